"""Priorities: a number on each experience, higher is taken first where an order is free.

What depends on when an experience is used (staleness, reuse) belongs to the reader: there a
priority decays; here it says what the group alone knows.
"""

from __future__ import annotations

from typing import Any, Protocol

from .filters import Candidate, JoinedGroup, mean_reward, reward_std
from .registry import Registry
from .settings import OperatorSettings

PRIORITIES: Registry[Any] = Registry("priority", method="of")


class Priority(Protocol):
    """What numbers the experiences of a group. Called once an experience; must not block."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """The priority of one kept member; `group.scored` holds all of them."""
        ...


@PRIORITIES.register("none")
@PRIORITIES.register("constant")
class Constant:
    """The same for all."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = float(value)

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Always `value`."""
        return self.value


@PRIORITIES.register("recency")
class Recency:
    """The newest policy_version in the trajectory: fresh experiences first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Its max_policy_version."""
        return float(member.payload.max_policy_version)


@PRIORITIES.register("reward")
class Reward:
    """The total reward: the best rollouts first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """Its reward."""
        return member.reward


@PRIORITIES.register("reward_std")
class RewardStd:
    """Population std of the group's rewards: groups that teach most first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """The same for all members of a group."""
        return reward_std(group.scored)


@PRIORITIES.register("surprise")
class Surprise:
    """Distance of the reward from the group's mean: the members with most advantage first."""

    def of(self, member: Candidate, group: JoinedGroup) -> float:
        """|reward - mean|."""
        return abs(member.reward - mean_reward(group.scored))


def build_priority(operator: OperatorSettings | None) -> Priority:
    """The declared priority; 0 for all when there is none. Raises ConfigError."""
    if operator is None:
        return Constant()
    return PRIORITIES.create(operator.name, operator.args)
