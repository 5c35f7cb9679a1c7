"""How much better an experience was than expected: what weights its tokens in the policy loss."""

from . import distillation, entropy_clip, steps
from .advantage import Advantage, AdvantageFn, group_rewards
from .baselines import reinforce
from .group import GroupAdvantage
from .returns import CriticAdvantage, ReturnAdvantage, token_rewards

__all__ = [
    "Advantage",
    "AdvantageFn",
    "CriticAdvantage",
    "GroupAdvantage",
    "ReturnAdvantage",
    "distillation",
    "entropy_clip",
    "group_rewards",
    "reinforce",
    "steps",
    "token_rewards",
]
