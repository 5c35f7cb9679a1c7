"""Who folds: sources, trainer, algorithms and checkpoints."""
