"""Reinforcement fine-tuning of language models as an event-sourced streaming system.

The map of the house, from the ground up; arrows point down only:

    schemas    the contracts: Avro schemas, typed events, codec, topic catalogue, errors
    streams    the log and what happens between topics: join, filters, priority, weights
    producers  who appends: scheduler, explorer, engines, workflows, rewards
    consumers  who folds: sources, trainer, algorithms, checkpoints
    deploy     how it runs: configuration, command line, supervisor, status

Producers and consumers never import each other: they meet on a topic.
"""

__version__ = "0.1.0"
