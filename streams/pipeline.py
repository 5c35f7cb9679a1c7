"""From a closed group to its experiences and drops: filters, priority, per-token rewards. Pure.

Per-token rewards are made when any score of a trajectory has a span: a span's weighted value lies
on the last token of the span, what has no span on the last token of all, so that their sum is the
reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..schemas.arrays import pack_floats
from ..schemas.errors import StreamrftError
from ..schemas.events import Drop, DropReason, Experience, GroupMember
from .filters import Candidate, Filter, JoinedGroup, Rejection, build_filters
from .join.outcomes import Closed, Dropped, JoinedMember
from .payloads import Payload
from .priority import build_priority
from .settings import StreamSettings


class Yield(msgspec.Struct):
    """What a closed group gives. `failures`: (slot, error) of members that an operator refused."""

    experiences: list[Experience]
    drops: list[Drop]
    failures: list[tuple[int, str]]


class Pipeline:
    """The declared filters and priority of one run. Stateless between groups."""

    def __init__(self, settings: StreamSettings) -> None:
        """Raises ConfigError for an unknown operator or wrong arguments."""
        self.settings = settings
        self._filters = build_filters(settings.filters)
        self._priority = build_priority(settings.priority)

    def run(
        self, closed: Closed, payloads: Mapping[int, Payload], *, partition: int, now_ms: int
    ) -> Yield:
        """Filter, prioritise and build.

        Args:
            closed: the join's decision.
            payloads: by slot; a member without one is dropped as invalid.
            partition: of the trajectories, which is that of the experiences.
            now_ms: produced_at of what is made.

        Raises:
            StreamrftError: only a retriable one of a user's operator.
        """
        group = _group(closed, payloads)
        result = _Result(closed, group)
        for member in closed.members:
            if member.slot not in payloads:
                result.drop(member.slot, member.trajectory_id, "invalid", "its record is gone")
        for name, step in self._filters:
            self._apply(name, step, result)
        if self._filters:
            result.reject_unsound(self._filters[-1][0])
        priorities = self._finish(result)
        scored = [
            GroupMember(slot=m.slot, trajectory_id=m.trajectory_id, reward=m.reward)
            for m in group.scored
            if math.isfinite(m.reward)
        ]
        experiences = [
            self._experience(result, m, scored, priorities[m.slot], partition, now_ms)
            for m in group.members
        ]
        if closed.revision:
            return Yield(experiences, [], result.failures)
        num = len(experiences)
        drops = [drop_event(d, now_ms, where=w, group_experiences=num) for d, w in result.drops]
        return Yield(experiences, drops, result.failures)

    def _apply(self, name: str, step: Filter, result: _Result) -> None:
        try:
            rejections = list(step.apply(result.group))
        except Exception as error:  # a user's operator may raise anything
            if isinstance(error, StreamrftError) and error.retriable:
                raise
            result.refuse(result.group.members, name, error)
            return
        result.reject(rejections, "filtered", name)

    def _finish(self, result: _Result) -> dict[int, float]:
        """Priorities by slot; whoever cannot become a valid experience is dropped as invalid."""
        priorities: dict[int, float] = {}
        rejections: list[Rejection] = []
        for member in list(result.group.members):
            try:
                priority = float(self._priority.of(member, result.group))
            except Exception as error:  # a user's operator may raise anything
                if isinstance(error, StreamrftError) and error.retriable:
                    raise
                result.refuse([member], "priority", error)
                continue
            priorities[member.slot] = priority
            if not (math.isfinite(member.reward) and math.isfinite(priority)):
                numbers = f"reward {member.reward}, priority {priority}: not finite"
                rejections.append(Rejection(member.slot, numbers))
            elif (size := self._size_bytes(member, result)) > self.settings.max_event_bytes:
                numbers = f"about {size:,} bytes, max_event_bytes {self.settings.max_event_bytes:,}"
                rejections.append(Rejection(member.slot, numbers))
        result.reject(rejections, "invalid", "join")
        return priorities

    def _size_bytes(self, member: Candidate, result: _Result) -> int:
        """Upper bound of the encoded experience."""
        payload = member.payload
        extra = len(member.loss_mask or b"") + 4 * payload.num_tokens * bool(
            result.joined[member.slot].spans
        )
        texts = 2 * len(member.trajectory_id) + 24
        return len(payload.value) + extra + (len(result.group.scored) + 2) * texts + 1024

    def _experience(
        self,
        result: _Result,
        member: Candidate,
        scored: list[GroupMember],
        priority: float,
        partition: int,
        now_ms: int,
    ) -> Experience:
        payload, joined = member.payload, result.joined[member.slot]
        mask = member.loss_mask
        return Experience(
            trajectory_id=member.trajectory_id,
            reward_revision=result.closed.revision,
            group_id=result.closed.group_id,
            slot=member.slot,
            number=result.closed.number,
            branch=payload.branch,
            min_policy_version=payload.min_policy_version,
            max_policy_version=payload.max_policy_version,
            num_tokens=payload.num_tokens,
            num_trained_tokens=payload.num_trained_tokens if mask is None else mask.count(1),
            reward=member.reward,
            reward_parts=member.parts,
            token_rewards=token_rewards(joined.spans, payload.lengths, member.reward),
            group=scored,
            group_experiences=len(result.group.members),
            loss_mask=mask,
            priority=priority,
            metrics=member.metrics,
            trajectory=payload.value,
            trajectory_partition=partition,
            trajectory_offset=joined.offset,
            produced_at=now_ms,
        )


class _Result:
    """One group on its way through the operators."""

    def __init__(self, closed: Closed, group: JoinedGroup) -> None:
        self.closed, self.group = closed, group
        self.joined: dict[int, JoinedMember] = {m.slot: m for m in closed.members}
        self.drops: list[tuple[Dropped, str]] = [(d, "join") for d in closed.drops]
        self.failures: list[tuple[int, str]] = []

    def drop(
        self, slot: int, trajectory_id: str, reason: DropReason, detail: str, where: str = "join"
    ) -> None:
        c = self.closed
        drop = Dropped(trajectory_id, c.group_id, slot, c.number, reason, detail)
        self.drops.append((drop, where))

    def reject(self, rejections: Sequence[Rejection], reason: DropReason, where: str) -> None:
        if not rejections:
            return
        details = {r.slot: r.detail for r in rejections}
        for member in self.group.members:
            if member.slot in details:
                self.drop(member.slot, member.trajectory_id, reason, details[member.slot], where)
        self.group.members = [m for m in self.group.members if m.slot not in details]

    def reject_unsound(self, where: str) -> None:
        """Users' operators may leave anything in a member; only what can be encoded goes on."""
        found = [Rejection(m.slot, what) for m in self.group.members if (what := _unsound(m))]
        self.reject(found, "invalid", where)
        for member in self.group.scored:
            if not isinstance(member.reward, int | float):
                member.reward = math.nan

    def refuse(self, members: Sequence[Candidate], where: str, error: Exception) -> None:
        detail = f"{where}: {type(error).__name__}: {error}"
        self.failures += [(m.slot, detail) for m in members]
        self.reject([Rejection(m.slot, detail) for m in members], "invalid", where)


def drop_event(
    dropped: Dropped, now_ms: int, *, where: str = "join", group_experiences: int | None = None
) -> Drop:
    """The event of a drop; `group_experiences` when the group's close decided it."""
    return Drop(
        trajectory_id=dropped.trajectory_id,
        group_id=dropped.group_id,
        slot=dropped.slot,
        number=dropped.number,
        reason=dropped.reason,
        detail=dropped.detail,
        where=where,
        group_experiences=group_experiences,
        produced_at=now_ms,
    )


def token_rewards(
    spans: Sequence[tuple[int, int, int, float]], lengths: Sequence[int], reward: float
) -> bytes | None:
    """Reward by token, float32 over the concatenated tokens; None when no score has a span.

    Args:
        spans: (sequence, start, end, weighted value); one outside the tokens counts as without.
        lengths: tokens a sequence, their sum T >= 1.
        reward: what the tokens' rewards add up to.

    Returns:
        T values as little-endian bytes.
    """
    if not spans:
        return None
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    values = np.zeros(sum(lengths))
    for sequence, start, end, value in spans:
        if sequence < len(lengths) and start < end <= lengths[sequence]:
            values[starts[sequence] + end - 1] += value
    values[-1] += reward - values.sum()
    return pack_floats(values)


def _unsound(member: Candidate) -> str:
    """What of a member no experience can carry; empty when nothing."""
    if not isinstance(member.reward, int | float):
        return f"reward is {member.reward!r}, no number"
    if not all(
        isinstance(k, str) and isinstance(v, int | float) for k, v in member.metrics.items()
    ):
        return f"metrics {member.metrics!r} are no numbers by name"
    mask = member.loss_mask
    if mask is not None and (len(mask) != member.payload.num_tokens or mask.strip(b"\0\1")):
        return f"loss_mask is not {member.payload.num_tokens} times 0 or 1"
    return ""


def _group(closed: Closed, payloads: Mapping[int, Payload]) -> JoinedGroup:
    scored = [
        Candidate(m.slot, m.trajectory_id, m.reward, m.parts, payload.metrics, payload)
        for m in closed.members
        if (payload := payloads.get(m.slot)) is not None
    ]
    return JoinedGroup(closed.group_id, closed.number, closed.size, scored, list(scored))
