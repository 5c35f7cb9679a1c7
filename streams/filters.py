"""Filters and mappers over one joined group, by the names that users of Trinity-RFT know.

A filter gets the group and returns whom it rejects, with its numbers; a mapper changes members
and rejects nobody. They run in the declared order; a mapper sees every scored member, so that
group statistics stay consistent, a filter only those still kept. A user's own class is named by
its dotted path and has the same `apply`.

Source: Trinity-RFT, "Experience operators"; DAPO, arXiv:2503.14476, sections 3.2 and 3.4.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ..schemas.errors import ConfigError
from .payloads import Payload
from .registry import Registry
from .settings import OperatorSettings

FILTERS: Registry[Any] = Registry("filter", method="apply")


class Candidate(msgspec.Struct):
    """One scored member on its way to an experience.

    `reward`, `metrics` and `loss_mask` may be changed; `loss_mask` is uint8 over the concatenated
    tokens of all sequences, None for the trajectory's own.
    """

    slot: int
    trajectory_id: str
    reward: float
    parts: dict[str, float]
    metrics: dict[str, float]
    payload: Payload
    loss_mask: bytes | None = None

    def stat(self, key: str) -> float | None:
        """A metric of the rollout, or else a part of its reward."""
        return self.metrics.get(key, self.parts.get(key))


class JoinedGroup(msgspec.Struct):
    """A closed group: `scored` never changes, `members` are those not rejected so far."""

    group_id: str
    number: int
    size: int
    scored: list[Candidate]
    members: list[Candidate]


class Rejection(msgspec.Struct):
    """Who is dropped, and the numbers that say why."""

    slot: int
    detail: str


class Filter(Protocol):
    """What runs over a joined group. Called once a closed group; must not block."""

    def apply(self, group: JoinedGroup) -> Sequence[Rejection]:
        """Change members, or name those to be dropped."""
        ...


@FILTERS.register("reward_filter")
class RewardFilter:
    """Keep members whose reward is at least `threshold`."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Reject the others one by one."""
        return [
            Rejection(m.slot, f"reward {m.reward:g} is below threshold {self.threshold:g}")
            for m in group.members
            if m.reward < self.threshold
        ]


@FILTERS.register("reward_std_filter")
class RewardStdFilter:
    """Keep a group whose rewards differ: their population std is above `threshold`."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Reject a whole group, one member alone too."""
        if len(group.members) < 2:
            return _all(group, f"{len(group.members)} member has no reward std")
        std = reward_std(group.members)
        if std > self.threshold:
            return []
        n = len(group.members)
        return _all(group, f"reward std {std:g} of {n} is not above threshold {self.threshold:g}")


@FILTERS.register("dapo_dynamic_sampling")
class DapoDynamicSampling:
    """Keep a group where some members are right, but not all."""

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        """`metric_key` names a metric or reward part; the reward stands in where it is absent."""
        self.metric_key, self.correct_threshold = metric_key, correct_threshold

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Reject a whole group, one member alone too."""
        n = len(group.members)
        scores = [m.stat(self.metric_key) for m in group.members]
        values = [m.reward if s is None else s for m, s in zip(group.members, scores, strict=True)]
        num_right = sum(value > self.correct_threshold for value in values)
        if n > 1 and 0 < num_right < n:
            return []
        return _all(
            group,
            f"{num_right} of {n} have {self.metric_key} above {self.correct_threshold:g}",
        )


@FILTERS.register("invalid_reward_filter")
class InvalidRewardFilter:
    """Keep members whose reward is a finite number."""

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Reject the others one by one."""
        return [
            Rejection(m.slot, f"reward is {m.reward}")
            for m in group.members
            if not math.isfinite(m.reward)
        ]


@FILTERS.register("mask_response_truncated")
class MaskResponseTruncated:
    """Take sequences that ended at the length limit out of the loss."""

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Mask them; nobody is rejected."""
        for member in group.scored:
            if any(member.payload.truncated):
                member.loss_mask = _untruncated(member)
        return []


@FILTERS.register("reward_shaping_mapper")
class RewardShapingMapper:
    """Combine the reward with statistics: reward = reward op (weight x stat)."""

    _OPS: Mapping[str, Callable[[float, float], float]] = {
        "ADD": operator.add,
        "SUB": operator.sub,
        "MUL": operator.mul,
        "DIV": operator.truediv,
    }

    def __init__(
        self,
        stats_key: str | None = None,
        op: str = "ADD",
        weight: float = 1.0,
        reward_shaping_configs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """One rule by its parts, or several as {stats_key, op_type, weight} (Trinity's form)."""
        rules = [dict(c) for c in reward_shaping_configs]
        if stats_key is not None:
            rules.append({"stats_key": stats_key, "op_type": op, "weight": weight})
        self.rules = [self._rule(**rule) for rule in rules]

    def _rule(
        self, stats_key: str, op_type: str = "ADD", weight: float = 1.0
    ) -> tuple[str, str, float]:
        if op_type not in self._OPS:
            raise ConfigError(
                f"reward_shaping_mapper: op {op_type!r} is none of {', '.join(self._OPS)}"
            )
        return stats_key, op_type, weight

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Shape every member that has the statistic; a divisor of 0 changes nothing."""
        for member in group.scored:
            for stats_key, op_type, weight in self.rules:
                stat = member.stat(stats_key)
                if stat is None or (op_type == "DIV" and weight * stat == 0):
                    continue
                member.reward = self._OPS[op_type](member.reward, weight * stat)
        return []


@FILTERS.register("pass_rate_calculator")
class PassRateCalculator:
    """Write the mean reward of the group as metric `pass_rate` on each member."""

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Measure; nobody is rejected."""
        for member in group.scored:
            member.metrics = {**member.metrics, "pass_rate": mean_reward(group.scored)}
        return []


@FILTERS.register("length_filter")
class LengthFilter:
    """Keep members of which the policy wrote `min_tokens` to `max_tokens` tokens."""

    def __init__(
        self,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        count: Literal["written", "all"] = "written",
    ) -> None:
        """`count` all takes the prompt in as well."""
        if count not in ("written", "all"):
            raise ConfigError(f"length_filter: count {count!r} is neither written nor all")
        self.min_tokens, self.max_tokens, self.count = min_tokens, max_tokens, count

    def apply(self, group: JoinedGroup) -> list[Rejection]:
        """Reject the others one by one."""
        top = math.inf if self.max_tokens is None else self.max_tokens
        return [
            Rejection(m.slot, f"{n} tokens {self.count}, {self.min_tokens} to {top} allowed")
            for m in group.members
            if not self.min_tokens <= (n := self._length(m)) <= top
        ]

    def _length(self, member: Candidate) -> int:
        payload = member.payload
        return payload.num_tokens if self.count == "all" else payload.num_trained_tokens


def build_filters(operators: Sequence[OperatorSettings]) -> list[tuple[str, Filter]]:
    """The declared filters with their names, in order. Raises ConfigError."""
    return [(o.name, FILTERS.create(o.name, o.args)) for o in operators]


def mean_reward(members: Sequence[Candidate]) -> float:
    """Mean of the rewards; 0 of nobody."""
    return math.fsum(m.reward for m in members) / len(members) if members else 0.0


def reward_std(members: Sequence[Candidate]) -> float:
    """Population standard deviation of the rewards; exactly 0 of equal ones and of nobody."""
    if len({m.reward for m in members}) < 2:
        return 0.0
    mean = mean_reward(members)
    return math.sqrt(math.fsum((m.reward - mean) ** 2 for m in members) / len(members))


def _all(group: JoinedGroup, detail: str) -> list[Rejection]:
    return [Rejection(m.slot, detail) for m in group.members]


def _untruncated(member: Candidate) -> bytes:
    """The member's loss mask, with zeros over its truncated sequences."""
    payload = member.payload
    if all(payload.truncated):
        return bytes(payload.num_tokens)
    return b"".join(
        bytes(s.num_tokens) if s.truncated else s.loss_mask for s in payload.sequences()
    )
