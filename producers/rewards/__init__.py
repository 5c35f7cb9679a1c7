"""Reward functions, by name."""
