"""Priorities: a number on each experience, higher is taken first where an order is free.

What depends on when an experience is used (staleness, reuse) belongs to the reader: there a
priority decays; here it says what the group alone knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .filters import Candidate, JoinedGroup, mean_reward, reward_std
from .operators import build
from .settings import OperatorSettings


class Priority(Protocol):
    """What numbers the experiences of a group. Called once an experience; must not block."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """The priority of one kept member; `group.scored` holds all of them."""
        ...


class Constant:
    """The same for all."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = float(value)

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Always `value`."""
        return self.value


class Recency:
    """The newest policy_version in the trajectory: fresh experiences first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Its max_policy_version."""
        return float(member.payload.max_policy_version)


class Reward:
    """The total reward: the best rollouts first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Its reward."""
        return member.reward


class RewardStd:
    """Population std of the group's rewards: groups that teach most first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """The same for all members of a group."""
        return reward_std(group.scored)


class Surprise:
    """Distance of the reward from the group's mean: the members with most advantage first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """|reward - mean|."""
        return abs(member.reward - mean_reward(group.scored))


PRIORITIES: dict[str, Callable[..., Priority]] = {
    "none": Constant,
    "constant": Constant,
    "recency": Recency,
    "reward": Reward,
    "reward_std": RewardStd,
    "surprise": Surprise,
}


def build_priority(operator: OperatorSettings | None) -> Priority:
    """The declared priority; 0 for all when there is none. Raises ConfigError."""
    if operator is None:
        return Constant()
    return build(operator, PRIORITIES, kind="priority", method="of")
