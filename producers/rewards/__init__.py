"""Reward functions, by name."""

from .dapo import MathDapoReward
from .reward import REWARDS, RewardFailed, RewardFunction, RolloutView, score, score_all
from .rules import AccuracyReward, CountdownReward, FormatReward, MathBoxedReward, MathReward

__all__ = [
    "REWARDS",
    "AccuracyReward",
    "CountdownReward",
    "FormatReward",
    "MathBoxedReward",
    "MathDapoReward",
    "MathReward",
    "RewardFailed",
    "RewardFunction",
    "RolloutView",
    "score",
    "score_all",
]
