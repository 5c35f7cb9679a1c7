"""Algorithms of reinforcement and supervised fine-tuning, each made of small pure functions."""

from .catalogue import ALGORITHMS, AlgorithmType, algorithm_type
from .registry import ADVANTAGES, AGGREGATIONS, ENTROPY_LOSSES, KL_LOSSES, POLICY_LOSSES

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ALGORITHMS",
    "ENTROPY_LOSSES",
    "KL_LOSSES",
    "POLICY_LOSSES",
    "AlgorithmType",
    "algorithm_type",
]
