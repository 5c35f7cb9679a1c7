"""The contracts of the log: events, their encoding and the topics that carry them."""
