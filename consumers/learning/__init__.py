"""The torch half of the trainer: model, batches, objective and optimiser."""
