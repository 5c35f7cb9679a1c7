"""Workflows, by name: how a task becomes trajectories."""
