"""How many groups are open, and which rows come next: the scheduler's pure core.

Events of one lineage go in, publications come out; no clock, no log. A restart folds the log
again and stands where its predecessor stood.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..schemas import events as ev
from ..streams.lineage import Lineage
from .settings import SchedulerSettings
from .tasksets import RowRef


class RowOrder(Protocol):
    """The rows of a run in the order in which they are published."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass."""
        ...

    def at(self, index: int) -> RowRef:
        """The row at this place, from 0, over all epochs."""
        ...


class Publication(NamedTuple):
    """One task to publish; `replaces` names the off-lineage publication of the row, or is -1."""

    number: int
    ref: RowRef
    replaces: int
    step: int
    min_policy_version: int


@dataclass
class _Group:
    """published -> rolled out -> trained | dead | off lineage."""

    number: int
    ref: RowRef
    root: int
    slots: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    waits_for_reward: bool = False
    has_experience: bool = False


class Window:
    """The publications of a run as one lineage sees them.

    A task of step c is published once policy_version c - 1 - S exists, S the allowed staleness:
    while outstanding < B (v + 1 + S - t), with v the newest announced version and t the last cut.
    Outstanding are groups published and neither trained, dead, off lineage nor parked.
    `awaits_rewards`: rewards come from outside, so `on_experience` is needed to know them.
    """

    def __init__(self, settings: SchedulerSettings, order: RowOrder, lineage: Lineage) -> None:
        self._settings, self._order, self._lineage = settings, order, lineage
        self._staleness = settings.pacing.allowed_staleness
        self._last_cut = lineage.fork_step
        self._policy_version = -1
        self._num_published = self._num_fresh = 0
        self._open: dict[str, _Group] = {}
        self._off: dict[str, _Group] = {}
        self._roots: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        self._due: list[tuple[int, str]] = []
        self._parked: set[str] = set()
        self._ended: ev.Ended | None = None
        self.awaits_rewards = False

    def on_task(self, task: ev.Task) -> None:
        """One publication, of this process or of its predecessors."""
        self._num_published = max(self._num_published, task.number + 1)
        root = task.number
        if task.replaces < 0:
            self._num_fresh += 1
        else:
            root = self._roots.get(task.replaces, task.replaces)
            self._roots[task.number] = root
            self._alive[root] = self._alive.get(root, 1) + 1
        ref = RowRef(task.taskset, task.row, task.epoch)
        self._open[task.group_id] = _Group(task.number, ref, root)

    def on_ended(self, ended: ev.Ended) -> None:
        """The end was said already."""
        if ended.branch == self._lineage.branch:
            self._ended = ended

    def on_checkpoint(self, checkpoint: ev.Checkpoint) -> None:
        """Weights that explorers can have."""
        if self._lineage.contains(checkpoint.branch, checkpoint.step):
            self._policy_version = max(self._policy_version, checkpoint.step)

    def on_cut(self, cut: ev.Cut) -> None:
        """A batch that is trained: its groups leave."""
        if not self._lineage.contains(cut.branch, cut.step):
            return
        self._last_cut = max(self._last_cut, cut.step)
        for group_id in {ev.group_of(m.trajectory_id) for m in cut.members}:
            self._recall(group_id)
            self._close(group_id)

    def on_drop(self, drop: ev.Drop) -> None:
        """A group that emitted nothing, or that the trainer dropped whole, is dead."""
        if drop.group_experiences == 0 and drop.where != "trainer":
            self._recall(drop.group_id)
            self._close(drop.group_id)
            return
        group = self._open.get(drop.group_id)
        if group is None or drop.where != "trainer" or not drop.group_experiences:
            return
        if not self._lineage.contains(drop.branch, drop.step):
            return
        if drop.reason == "off_lineage":
            self._leave(drop.group_id)
            return
        group.lost.add(drop.slot)
        if len(group.lost) >= drop.group_experiences:
            self._close(drop.group_id)

    def on_trajectory(self, trajectory: ev.Trajectory, log_time_ms: int) -> None:
        """A slot is filled; the first trajectory holds it."""
        group = self._open.get(trajectory.group_id)
        if group is None or trajectory.slot in group.slots:
            return
        if not self._is_in_lineage(trajectory):
            self._leave(trajectory.group_id)
            return
        group.slots.add(trajectory.slot)
        scored = {score.source for score in trajectory.scores}
        if not trajectory.is_failed:
            group.waits_for_reward |= bool(trajectory.reward_sources.keys() - scored)
        self.awaits_rewards |= group.waits_for_reward
        wait_ms = self._settings.reward_wait_ms
        is_whole = len(group.slots) == trajectory.group_size
        if is_whole and group.waits_for_reward and wait_ms is not None:
            heapq.heappush(self._due, (log_time_ms + wait_ms, trajectory.group_id))

    def on_experience(self, group_id: str) -> None:
        """The group was rewarded: it is the trainer's turn now, so it is not parked."""
        group = self._open.get(group_id)
        if group is not None:
            group.has_experience = True
            self._parked.discard(group_id)

    def plan(self, now_ms: int, limit: int) -> list[Publication]:
        """Publications due now, at most `limit`; publish them all, then fold their tasks."""
        self._park(now_ms)
        count = min(limit, self.num_allowed)
        rows = [(g.ref, g.number) for g in self._to_replace()[:count]]
        fresh = self._num_fresh
        while len(rows) < count and self._has_fresh(fresh):
            rows.append((self._order.at(fresh), -1))
            fresh += 1
        outstanding = self.num_outstanding
        steps = [
            self._last_cut + 1 + (outstanding + i) // self._settings.batch_size
            for i in range(len(rows))
        ]
        return [
            Publication(
                self._num_published + i, ref, replaces, step, max(0, step - 1 - self._staleness)
            )
            for i, ((ref, replaces), step) in enumerate(zip(rows, steps, strict=True))
        ]

    def end(self, now_ms: int) -> ev.Ended | None:
        """The Ended event that is due and not said yet."""
        if not self.is_over or (
            self._ended is not None and self._ended.num_groups == self.num_in_lineage
        ):
            return None
        return ev.Ended(
            branch=self._lineage.branch, num_groups=self.num_in_lineage, produced_at=now_ms
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be published."""
        if self._settings.total_steps is not None:
            return self._last_cut >= self._settings.total_steps
        return not self._has_fresh(self._num_fresh) and not self._to_replace()

    @property
    def is_done(self) -> bool:
        """Whether nothing can come up any more: over, said, and no row can still leave lineage."""
        if not self.is_over or self.end(0) is not None:
            return False
        return self._settings.total_steps is not None or not self._open

    @property
    def num_allowed(self) -> int:
        """Groups that may be published now, by pacing, by the last step and by the bound."""
        s = self._settings
        ahead = self._policy_version + 1 + self._staleness - self._last_cut
        if s.total_steps is not None:
            ahead = min(ahead, s.total_steps - self._last_cut)
        room = min(s.batch_size * ahead - self.num_outstanding, s.max_open_groups - len(self._open))
        return max(0, room)

    @property
    def num_outstanding(self) -> int:
        """Groups that count against the window."""
        return len(self._open) - len(self._parked)

    @property
    def num_parked(self) -> int:
        """Groups rolled out that wait for a reward longer than reward_wait."""
        return len(self._parked)

    @property
    def num_in_lineage(self) -> int:
        """Groups published that belong to this lineage, dead ones included."""
        return self._num_published - len(self._off)

    @property
    def branch(self) -> str:
        """The branch that is published for."""
        return self._lineage.branch

    def blocker(self) -> str:
        """What the next publication waits for, for people."""
        if len(self._open) >= self._settings.max_open_groups:
            return (
                f"groups to close: {len(self._open)} are open, {self.num_parked} of them without "
                f"a reward; synchronizer.max_open_groups is {self._settings.max_open_groups}"
            )
        if self._policy_version < 0:
            return "the first checkpoint"
        return (
            f"cut of step {self._last_cut + 1} or a checkpoint after step {self._policy_version} "
            f"({self.num_outstanding} groups outstanding)"
        )

    def _is_in_lineage(self, trajectory: ev.Trajectory) -> bool:
        """No token is newer than the fork. What failed has none, so its group's others decide."""
        return trajectory.is_failed or self._lineage.contains(
            trajectory.branch, trajectory.max_policy_version
        )

    def _close(self, group_id: str) -> None:
        self._open.pop(group_id, None)
        self._parked.discard(group_id)

    def _leave(self, group_id: str) -> None:
        """Off lineage: the group counts no more, and its row is due again."""
        group = self._open.pop(group_id)
        self._parked.discard(group_id)
        self._off[group_id] = group
        self._alive[group.root] = self._alive.get(group.root, 1) - 1

    def _recall(self, group_id: str) -> None:
        """A cut or the join closed the group for this lineage too, whatever wrote its tokens."""
        group = self._off.pop(group_id, None)
        if group is not None:
            self._alive[group.root] += 1

    def _to_replace(self) -> list[_Group]:
        """Off-lineage groups whose row has no other publication, the oldest first."""
        last: dict[int, _Group] = {}
        for group in self._off.values():
            if self._alive[group.root] <= 0:
                last[group.root] = max(group, last.get(group.root, group), key=lambda g: g.number)
        return sorted(last.values(), key=lambda g: g.number)

    def _has_fresh(self, index: int) -> bool:
        s = self._settings
        return s.total_steps is not None or index < self._order.rows_per_epoch * s.total_epochs

    def _park(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, group_id = heapq.heappop(self._due)
            group = self._open.get(group_id)
            if group is not None and not group.has_experience:
                self._parked.add(group_id)
