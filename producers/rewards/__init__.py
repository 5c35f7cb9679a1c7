"""Reward functions, by name."""

from .reward import REWARDS, RewardFailed, RewardFunction, RolloutView, score
from .rules import AccuracyReward, CountdownReward, FormatReward, MathBoxedReward, MathReward

__all__ = [
    "REWARDS",
    "AccuracyReward",
    "CountdownReward",
    "FormatReward",
    "MathBoxedReward",
    "MathReward",
    "RewardFailed",
    "RewardFunction",
    "RolloutView",
    "score",
]
