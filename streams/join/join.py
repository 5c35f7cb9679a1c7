"""The join: trajectories and rewards of one partition become closed groups.

Pure: no I/O and no clock; time comes in through `on_time`. Between two calls of `on_time` the
order of events does not matter, except that a correction after completion is late.

A reward's final count is one of applied, duplicate (same revision again), late (its time is after
the deadline, or it was read after the close), superseded (by a higher revision, or its attempt
did not get the slot), orphan (its trajectory never came), refused (unknown source, a span outside
the tokens, a failed or invalid trajectory) and forwarded; until then it is early.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...schemas.errors import InvalidEvent
from ...schemas.events import Reward, Trajectory
from ...schemas.topics import partition_for
from ..log import Position
from ..settings import StreamSettings
from .closing import amended, close_group, dropped, ended
from .deadlines import Deadlines
from .outcomes import Misaddressed, Outcome
from .rewards import RewardBook
from .state import (
    FAILED,
    INVALID,
    LIVE,
    MAX_DETAIL,
    Group,
    Member,
    Standing,
    decode_group,
    encode_group,
    member_of,
    split_id,
    standing_of,
)

TRAJECTORY_COUNTS = ("trajectories", "repeats", "groups", "amended")


class RewardJoin:
    """Hold a group until every expected source has scored every member, or its deadline passes.

    unopened -> open -> closed -> forgotten        (amended: a correction after the close)

    The owner feeds events in log order, applies clock events at their positions, and makes
    `take_changes` durable together with the outcomes and the positions.
    """

    def __init__(
        self, settings: StreamSettings, *, partition: int = 0, num_partitions: int = 1
    ) -> None:
        self.settings, self.partition, self.num_partitions = settings, partition, num_partitions
        self.groups: dict[str, Group] = {}
        self._book = RewardBook(keeps_late=settings.late == "amend")
        self.counts = self._book.counts | dict.fromkeys(TRAJECTORY_COUNTS, 0)
        self._book.counts = self.counts
        self.time_ms = 0
        self.num_open = self.num_pending = 0
        self._closing, self._forgetting = Deadlines(), Deadlines()
        self._changed: set[str] = set()
        self._sources: dict[tuple[tuple[str, float], ...], dict[str, float]] = {}

    @property
    def has_open_deadline(self) -> bool:
        """Whether some open group will close by time alone, so that clock events are needed."""
        return len(self._closing) > 0

    @property
    def next_forgetting_ms(self) -> int | None:
        """Stream time at which the oldest memory ends."""
        return self._forgetting.next_ms

    def on_trajectory(self, trajectory: Trajectory, at: Position) -> list[Outcome]:
        """Take a trajectory that `validate.check` accepted.

        Raises:
            InvalidEvent: wrong partition or another group size than its group; nothing changed.
        """
        group = self._group_for(trajectory)
        self.counts["trajectories"] += 1
        if group.knows(trajectory.slot, trajectory.attempt):
            self.counts["repeats"] += 1
            return []
        outcomes = self._place(group, trajectory, at)
        self._touch(group)
        return outcomes

    def on_invalid(
        self,
        trajectory_id: str,
        *,
        time_ms: int,
        number: int = -1,
        group_size: int = 0,
        detail: str = "",
    ) -> list[Outcome]:
        """Take note of a refused record whose id can be read.

        Where the group size is known, its slot counts as filled from the first clock event at or
        after `time_ms` (the log's time) + grace, unless a valid attempt took it: no group waits
        for ever for a record that was refused.
        """
        group_id, slot, attempt = split_id(trajectory_id)
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        if group.knows(slot, attempt):
            self.counts["repeats"] += 1
            return []
        if not group.size and 0 <= slot < group_size:
            self._open(group, group_size, number)
        outcomes: list[Outcome] = []
        if group.is_open and slot < group.size and slot not in group.holders:
            member = Member(-1, time_ms, time_ms, INVALID, 1, (), {}, [], detail[:MAX_DETAIL])
            group.num_waiting += 1
            self._hold(group, slot, attempt, member)
            self._book.take_early(group, slot, others_may_come=True)
            outcomes = self._end_early(group, slot)
        else:
            self._remember(group, slot, attempt, time_ms)
            outcomes = [dropped(group, slot, attempt, "invalid", detail)]
        self._touch(group)
        return outcomes

    def on_reward(self, reward: Reward) -> list[Outcome]:
        """Take a reward whose `produced_at` is set.

        Raises:
            InvalidEvent: the slot in its trajectory_id is no number; nothing changed.
        """
        group_id, slot, attempt = split_id(reward.trajectory_id)
        self.counts["rewards"] += 1
        if partition_for(group_id.encode(), self.num_partitions) != self.partition:
            self.counts["forwarded"] += 1
            return [Misaddressed(reward, group_id)]
        standing = standing_of(reward)
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        holder = group.holders.get(slot)
        if holder == attempt:
            outcomes = self._score(group, slot, reward.source, standing)
        elif group.is_closed:
            outcomes = self._count("late" if holder is None else "superseded")
        elif holder is not None and group.members[slot].state != INVALID:
            outcomes = self._count("superseded")
        else:
            outcomes = []
            self._book.keep_early(group, reward, standing, self._horizon(standing.time_ms))
        self._touch(group)
        return outcomes

    def on_time(self, now_ms: int) -> list[Outcome]:
        """Apply a clock event: close what is due, forget what is old. Time never goes back."""
        if now_ms <= self.time_ms:
            return []
        self.time_ms = now_ms
        outcomes: list[Outcome] = []
        for group_id in self._closing.pop_due(now_ms):
            outcomes += self._close(self.groups[group_id])
            self._touch(self.groups[group_id])
        for group_id in self._forgetting.pop_due(now_ms):
            self._forget(self.groups[group_id])
        return outcomes

    def close_all(self) -> list[Outcome]:
        """Close every open group as its deadline would: the end of a history without clocks."""
        outcomes: list[Outcome] = []
        for group in [g for g in self.groups.values() if g.is_open]:
            outcomes += self._close(group)
            self._touch(group)
        return outcomes

    def take_changes(self) -> dict[str, bytes | None]:
        """State of every group changed since the last call; None where it was forgotten."""
        changes: dict[str, bytes | None] = {}
        for group_id in sorted(self._changed):
            group = self.groups.get(group_id)
            changes[group_id] = encode_group(group) if group is not None else None
        self._changed.clear()
        return changes

    def restore(self, states: Iterable[bytes], *, counts: dict[str, int], time_ms: int) -> None:
        """Fill an empty join from the last state of every group, its counts and stream time."""
        assert not self.groups, "restore needs an empty join"
        self.counts.update(counts)
        self.time_ms = time_ms
        for value in states:
            group = decode_group(value)
            for member in group.members.values():
                member.sources = self._shared(member.sources)
            self.groups[group.group_id] = group
            self.num_open += group.is_open
            self.num_pending += group.num_pending
            self._book.num_early += len(group.early)
            self._touch(group)
        self._changed.clear()

    def gauges(self) -> dict[str, int]:
        """Sizes of the open state: groups, trajectories and rewards without a final state."""
        return {
            "open_groups": self.num_open,
            "pending": self.num_pending,
            "early": self._book.num_early,
            "remembered": len(self.groups) - self.num_open,
        }

    def _group_for(self, trajectory: Trajectory) -> Group:
        group_id = trajectory.group_id
        home = partition_for(group_id.encode(), self.num_partitions)
        if home != self.partition:
            raise InvalidEvent(
                f"{trajectory.trajectory_id}: lies on partition {self.partition}, its group on "
                f"{home}. Send it with its group_id as the key.",
                field="group_id",
            )
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        if group.is_open and group.size != trajectory.group_size:
            raise InvalidEvent(
                f"{trajectory.trajectory_id}: group_size {trajectory.group_size}, but its group "
                f"was opened with {group.size}. Give every member the same.",
                field="group_size",
            )
        return group

    def _place(self, group: Group, trajectory: Trajectory, at: Position) -> list[Outcome]:
        slot = trajectory.slot
        holder = group.holders.get(slot)
        if group.is_closed:
            reason = "late" if holder is None else "superseded"
            return self._drop_other(group, trajectory, reason)
        if not group.size:
            if trajectory.produced_at <= self.time_ms - self.settings.late_horizon_ms:
                self._close_unopened(group)
                return self._drop_other(group, trajectory, "late")
            self._open(group, trajectory.group_size, trajectory.number)
        elif trajectory.produced_at <= group.late_until_ms:
            return self._drop_other(group, trajectory, "late")
        outcomes: list[Outcome] = []
        if holder is not None:
            if group.members[slot].state != INVALID:
                return self._drop_other(group, trajectory, "superseded")
            outcomes += self._displace(group, slot)
        if trajectory.group_deadline_ms is not None and not group.has_valid:
            group.fill_by_ms = trajectory.produced_at + trajectory.group_deadline_ms
            group.is_timed = True
        outcomes += self._fill(group, trajectory, at)
        if group.is_complete:
            outcomes += self._close(group)
        return outcomes

    def _fill(self, group: Group, trajectory: Trajectory, at: Position) -> list[Outcome]:
        member = member_of(trajectory, at.offset)
        member.sources = self._shared(member.sources)
        slot = trajectory.slot
        group.num_waiting += member.num_missing > 0
        self._hold(group, slot, trajectory.attempt, member)
        group.time_ms = max(group.time_ms, trajectory.produced_at)
        if group.early:
            self._book.take_early(group, slot)
        if member.state == FAILED:
            return self._end_early(group, slot)
        return self._release_withheld(group)

    def _open(self, group: Group, size: int, number: int) -> None:
        group.size, group.number, group.forget_at_ms = size, number, None
        group.late_until_ms = self.time_ms - self.settings.late_horizon_ms
        self.num_open += 1

    def _hold(self, group: Group, slot: int, attempt: str, member: Member) -> None:
        group.holders[slot] = attempt
        group.members[slot] = member
        group.is_timed |= member.deadline_ms is not None
        self.num_pending += member.state == LIVE

    def _displace(self, group: Group, slot: int) -> list[Outcome]:
        """A valid attempt takes the slot of a refused one."""
        outcomes = self._release_withheld(group) if group.withheld == slot else []
        group.dropped.append(f"{slot}:{group.holders.pop(slot)}")
        del group.members[slot]
        group.num_waiting -= 1
        return outcomes

    def _end_early(self, group: Group, slot: int) -> list[Outcome]:
        """Drop a failed or refused member now, or at the close when nobody else could tell it."""
        outcomes = self._release_withheld(group)
        group.withheld = slot
        self.num_pending += 1
        if group.has_living:
            outcomes += self._release_withheld(group)
        return outcomes

    def _release_withheld(self, group: Group) -> list[Outcome]:
        if group.withheld < 0:
            return []
        slot, group.withheld = group.withheld, -1
        self.num_pending -= 1
        return [ended(group, slot)]

    def _drop_other(
        self, group: Group, trajectory: Trajectory, reason: Literal["late", "superseded"]
    ) -> list[Outcome]:
        """Drop a trajectory that gets no slot."""
        slot, attempt = trajectory.slot, trajectory.attempt
        if reason == "superseded":
            detail = f"slot {slot} is held by attempt {group.holders[slot]}"
        else:
            detail = f"group closed, or older than {self.settings.late_horizon_ms / 1000:g} s"
        self._remember(group, slot, attempt, trajectory.produced_at)
        return [dropped(group, slot, attempt, reason, detail)]

    def _remember(self, group: Group, slot: int, attempt: str, time_ms: int) -> None:
        """Know a dropped id again for as long as its trajectory would not be late by its age."""
        group.dropped.append(f"{slot}:{attempt}")
        group.time_ms = max(group.time_ms, time_ms)
        if not group.is_open:
            until = group.time_ms + self.settings.late_horizon_ms
            group.forget_at_ms = max(group.forget_at_ms or 0, until)

    def _score(self, group: Group, slot: int, source: str, standing: Standing) -> list[Outcome]:
        if group.is_closed:
            if standing.event_id in group.seen:
                return self._count("duplicate")
            self.counts["late"] += 1
            return self._amend(group, [(slot, source, standing)])
        self._book.apply(group, slot, source, standing)
        return self._close(group) if group.is_complete else []

    def _close(self, group: Group) -> list[Outcome]:
        self.num_open -= 1
        self.num_pending -= group.num_pending
        self.counts["groups"] += 1
        outcomes: list[Outcome] = [close_group(group, self.settings, time_ms=self.time_ms)]
        group.is_closed, group.withheld = True, -1
        group.forget_at_ms = self._horizon(group.time_ms)
        group.seen = [
            score.event_id
            for member in group.members.values()
            for score in member.scores
            if isinstance(score, Standing) and score.event_id
        ]
        self._book.orphan_early(group)
        after, group.after = group.after, []
        outcomes += self._amend(
            group, [(split_id(late.trajectory_id)[1], late.source, late.reward) for late in after]
        )
        if self.settings.late != "amend":
            group.members = {}
        return outcomes

    def _amend(self, group: Group, rewards: list[tuple[int, str, Standing]]) -> list[Outcome]:
        if self.settings.late != "amend" or not rewards:
            return []
        again = amended(group, rewards)
        self.counts["amended"] += again is not None
        return [again] if again else []

    def _close_unopened(self, group: Group) -> None:
        group.is_closed = True
        group.forget_at_ms = self.time_ms + self.settings.late_horizon_ms
        self._book.orphan_early(group)

    def _forget(self, group: Group) -> None:
        self._book.orphan_early(group, self.time_ms)
        if group.forget_at_ms is not None and group.forget_at_ms <= self.time_ms:
            group.forget_at_ms = None
            group.dropped = []
            group.is_closed = False
            group.size = 0
        if group.size or group.early or group.forget_at_ms is not None:
            self._touch(group)
            return
        del self.groups[group.group_id]
        self._changed.add(group.group_id)

    def _touch(self, group: Group) -> None:
        group_id = group.group_id
        self._changed.add(group_id)
        due = group.close_due_ms()
        self._closing.set(group_id, None if due is None else due + self.settings.grace_ms)
        self._forgetting.set(group_id, group.forget_due_ms())

    def _count(self, name: str) -> list[Outcome]:
        self.counts[name] += 1
        return []

    def _horizon(self, time_ms: int) -> int:
        return max(time_ms, self.time_ms) + self.settings.late_horizon_ms

    def _shared(self, sources: dict[str, float]) -> dict[str, float]:
        """One object for all members with these sources: a run has few kinds, many members."""
        return self._sources.setdefault(tuple(sources.items()), sources)
