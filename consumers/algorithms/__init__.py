"""Algorithms: advantage, policy loss, KL, entropy and aggregation as pure functions."""
