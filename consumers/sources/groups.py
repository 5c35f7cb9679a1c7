"""Experiences to batches of groups: assembly, staleness, lineage and the short last batch. Pure.

No clock, no log: events go in, members of the next batch and drops come out, and the position is
plain data. Payloads stay outside; what waits here is about 500 bytes an experience.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...schemas.events import Drop, Ended, Experience
from .members import BatchRules, Lineage, Member, member_of
from .pairing import beside_pair, wanted_first
from .positions import ClosedGroups, FinalOffsets


@dataclass
class _Group:
    """open (members arrive) -> closed (trained, or dead: every member dropped)."""

    group_id: str
    number: int
    expected: int | None = None
    members: dict[str, Member] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    was_off_lineage: bool = False

    @property
    def num_read(self) -> int:
        return len(self.members) + len(self.gone)

    @property
    def is_complete(self) -> bool:
        return self.expected is not None and self.num_read >= self.expected

    def order(self) -> tuple[float, int, int, str]:
        """Highest priority first, then the oldest weights, lest they become stale."""
        highest = max(m.priority for m in self.members.values())
        oldest = min(m.min_policy_version for m in self.members.values())
        return -highest, oldest, self.number, self.group_id


class GroupAssembly:
    """Holds experiences until their group is whole, and cuts batches of whole groups.

    An experience: waiting -> trained | stale | off_lineage | ignored (a repeat, an amendment).
    """

    def __init__(
        self,
        rules: BatchRules,
        lineage: Lineage,
        branch: str,
        num_partitions: int,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """`position`: what `position()` of an earlier one returned, JSON round trip included.

        `released` collects the places of members that wait no more, for the caller to empty;
        `num_unpaired` counts groups since the last batch of which no pair could be made.
        """
        self.rules, self.lineage, self.branch = rules, lineage, branch
        saved = position or {"experiences": {}, "closed": None, "gone": []}
        offsets: Mapping[str, Any] = saved["experiences"]
        self.offsets = {p: _final_offsets(offsets.get(str(p))) for p in range(num_partitions)}
        self.closed = ClosedGroups(saved["closed"])
        self.num_ignored = self.num_unpaired = 0
        self.released: list[tuple[int, int]] = []
        self._groups: dict[str, _Group] = {}
        self._unjudged: list[Member] = []
        self._judged_at = -1
        self._num_groups_at_end: int | None = None
        for entry in saved["gone"]:
            self._groups[entry["group_id"]] = _Group(
                entry["group_id"],
                entry["number"],
                entry["expected"],
                gone=set(entry["ids"]),
                was_off_lineage=entry["off_lineage"],
            )

    def on_experience(self, e: Experience, partition: int, offset: int) -> bool:
        """Take one record of `experiences`; False when it is not waited for."""
        if not self.offsets[partition].read(offset):
            return False
        group = self._open_group(e.group_id, e.number)
        if (
            e.reward_revision > 0
            or group is None
            or e.trajectory_id in group.members
            or e.trajectory_id in group.gone
        ):
            self.offsets[partition].finish(offset)
            self.num_ignored += 1
            return False
        group.expected = e.group_experiences
        member = member_of(e, partition, offset)
        group.members[e.trajectory_id] = member
        self._unjudged.append(member)
        return True

    def is_news(self, group_id: str, number: int, partition: int, offset: int) -> bool:
        """Whether a record was not read before, and its group is not closed."""
        is_new = self.offsets[partition].is_new(offset)
        return is_new and not self.closed.contains(group_id, number)

    def holds(self, group_id: str, trajectory_id: str) -> bool:
        """Whether an experience waits here."""
        group = self._groups.get(group_id)
        return group is not None and trajectory_id in group.members

    def on_unreadable(
        self, group_id: str, number: int, name: str, partition: int, offset: int
    ) -> None:
        """Take the place of a record that is no experience, so that its group can go on.

        `name` is its trajectory_id, or anything that is no other's.
        """
        if not self.offsets[partition].read(offset):
            return
        self.offsets[partition].finish(offset)
        group = self._open_group(group_id, number)
        if group is not None and name not in group.members:
            group.gone.add(name)
            self._close_if_dead(group)

    def on_drop(self, drop: Drop) -> None:
        """Take one record of `drops`: a dead group, or what a trainer dropped on this lineage."""
        group = self._open_group(drop.group_id, drop.number)
        if group is None:
            return
        if drop.where == "trainer":
            if self.lineage.contains(drop.branch, drop.step):
                self._lose(group, drop.trajectory_id, drop)
        elif drop.group_experiences == 0:
            group.expected = 0
        self._close_if_dead(group)
        if not group.num_read and group.expected is None:
            self._groups.pop(group.group_id, None)

    def on_ended(self, ended: Ended) -> None:
        """Take the scheduler's word that no more tasks come; only the current branch counts."""
        if ended.branch == self.branch and not self.rules.ends_by_steps:
            self._num_groups_at_end = ended.num_groups

    def judge(self, steps_done: int, now_ms: int) -> list[Drop]:
        """Drop what the next step may not train on; the drops are to be published at once."""
        members = self._unjudged
        if steps_done != self._judged_at:
            members = [m for g in self._groups.values() for m in g.members.values()]
        self._unjudged, self._judged_at = [], steps_done
        drops: list[Drop] = []
        for m in members:
            if (drop := self._verdict(m, steps_done, now_ms)) is not None:
                drops += self._apply(m, drop, steps_done, now_ms)
        if self.rules.in_pairs:
            drops += self._beside_pairs(steps_done, now_ms)
        return drops

    def drop(
        self,
        m: Member,
        reason: Literal["stale", "off_lineage", "invalid", "filtered"],
        detail: str,
        steps_done: int,
        now_ms: int,
    ) -> Drop:
        """The trainer's drop of a member as an event; give it to `on_drop` to apply it."""
        return Drop(
            trajectory_id=m.trajectory_id,
            group_id=m.group_id,
            slot=m.slot,
            number=m.number,
            reason=reason,
            detail=detail,
            where="trainer",
            branch=self.branch,
            step=steps_done,
            group_experiences=m.group_experiences,
            produced_at=now_ms,
        )

    def select(self) -> list[Member] | None:
        """Members of the next batch in training order, or None; changes nothing.

        Call `judge` first: what it left is fit for the step.
        """
        ready = self._ready()
        size = self.rules.batch_groups
        if len(ready) < size and not (ready and self._all_arrived(ready)):
            return None
        batch = ready[:size]
        if self.rules.in_number_order and not self._has_no_gap(batch):
            return None
        order = wanted_first if self.rules.in_pairs else _by_slot
        return [m for g in batch for m in sorted(g.members.values(), key=order)]

    def take(self, members: Iterable[tuple[str, int, int, int]]) -> None:
        """Mark (group_id, number, partition, offset) as trained; also for a recorded cut."""
        self.num_unpaired = 0
        for group_id, number, partition, offset in members:
            self.offsets[partition].finish(offset)
            group = self._groups.pop(group_id, None)
            for member in group.members.values() if group else ():
                self._finish(member)
            self.closed.add(group_id, number, in_lineage=True)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train and nothing will come."""
        ready = self._ready()
        return not ready and self._all_arrived(ready)

    @property
    def num_ready(self) -> int:
        """Whole groups held."""
        return sum(g.is_complete and bool(g.members) for g in self._groups.values())

    @property
    def num_waiting(self) -> int:
        """Experiences held."""
        return sum(len(g.members) for g in self._groups.values())

    def blocker(self, step: int) -> str:
        """What the next batch waits for, for people."""
        ready = self._ready()
        open_groups = [g for g in self._groups.values() if not (g.is_complete and g.members)]
        text = (
            f"experiences: step {step} needs {self.rules.batch_groups} groups, has "
            f"{len(ready)} ready, {len(open_groups)} incomplete"
        )
        if self.rules.in_number_order:
            number = self._next_number(ready)
            text += f"; deterministic: true trains in order of publication, {number} is next"
        if open_groups:
            oldest = min(open_groups, key=lambda g: (g.number, g.group_id))
            wanted = "?" if oldest.expected is None else oldest.expected
            text += f"; oldest pending group {oldest.group_id} ({oldest.num_read} of {wanted} read)"
        if self.num_unpaired:
            text += f"; {self.num_unpaired} came since the last batch without two different rewards"
        if self._num_groups_at_end is not None:
            closed = self.closed.num_in_lineage
            text += f"; all {self._num_groups_at_end} tasks are published, {closed} are done"
        return text

    def position(self) -> dict[str, Any]:
        """Plain JSON: a restart with it reads again exactly what has no final state."""
        gone = [
            {
                "group_id": g.group_id,
                "number": g.number,
                "expected": g.expected,
                "ids": sorted(g.gone),
                "off_lineage": g.was_off_lineage,
            }
            for g in self._groups.values()
            if g.gone
        ]
        return {
            "experiences": {str(p): o.position() for p, o in self.offsets.items()},
            "closed": self.closed.position(),
            "gone": gone,
        }

    def _open_group(self, group_id: str, number: int) -> _Group | None:
        if self.closed.contains(group_id, number):
            return None
        return self._groups.setdefault(group_id, _Group(group_id, number))

    def _verdict(self, m: Member, steps_done: int, now_ms: int) -> Drop | None:
        group = self._groups.get(m.group_id)
        if group is None or m.trajectory_id not in group.members:
            return None
        if group.was_off_lineage or not self.lineage.contains(m.branch, m.max_policy_version):
            detail = (
                f"the group has tokens that are no part of branch {self.branch}; this one was "
                f"written by policy_version {m.max_policy_version} of {m.branch}"
            )
            return self.drop(m, "off_lineage", detail, steps_done, now_ms)
        limit = self.rules.limit(m.sources)
        staleness = steps_done - m.min_policy_version
        if limit is None or staleness <= limit:
            return None
        detail = (
            f"policy_version {m.min_policy_version} is {staleness} behind the trainer's "
            f"{steps_done}; max_staleness is {limit}"
        )
        return self.drop(m, "stale", detail, steps_done, now_ms)

    def _apply(self, m: Member, drop: Drop, steps_done: int, now_ms: int) -> list[Drop]:
        """Lose one member; a group is off lineage as a whole, since its row comes again."""
        group = self._groups[m.group_id]
        self._lose(group, m.trajectory_id, drop)
        drops = [drop]
        for other in list(group.members.values()) if group.was_off_lineage else ():
            again = self._verdict(other, steps_done, now_ms)
            assert again is not None
            self._lose(group, other.trajectory_id, again)
            drops.append(again)
        self._close_if_dead(group)
        return drops

    def _beside_pairs(self, steps_done: int, now_ms: int) -> list[Drop]:
        """Lose the members of whole groups that no pair is made of."""
        drops: list[Drop] = []
        for group in [g for g in self._groups.values() if g.is_complete]:
            for m, why in list(beside_pair(group.members.values())):
                drop = self.drop(m, "filtered", why, steps_done, now_ms)
                drops += self._apply(m, drop, steps_done, now_ms)
            self.num_unpaired += not group.members
        return drops

    def _finish(self, member: Member) -> None:
        self.offsets[member.partition].finish(member.offset)
        self.released.append((member.partition, member.offset))

    def _lose(self, group: _Group, trajectory_id: str, drop: Drop) -> None:
        member = group.members.pop(trajectory_id, None)
        if member is not None:
            self._finish(member)
        group.gone.add(trajectory_id)
        group.was_off_lineage |= drop.reason == "off_lineage"
        if group.expected is None:
            group.expected = drop.group_experiences

    def _close_if_dead(self, group: _Group) -> None:
        if group.is_complete and not group.members:
            self._groups.pop(group.group_id, None)
            self.closed.add(group.group_id, group.number, in_lineage=not group.was_off_lineage)

    def _ready(self) -> list[_Group]:
        ready = [g for g in self._groups.values() if g.is_complete and g.members]
        if self.rules.in_number_order:
            return sorted(ready, key=lambda g: (g.number, g.group_id))
        return sorted(ready, key=_Group.order)

    def _all_arrived(self, ready: Sequence[_Group]) -> bool:
        known = sum(1 for g in self._groups.values() if g.expected is not None)
        if self._num_groups_at_end is None or len(ready) < known:
            return False
        return self.closed.num_in_lineage + len(ready) >= self._num_groups_at_end

    def _next_number(self, ready: Sequence[_Group]) -> int:
        """The lowest publication number that is neither closed nor ready."""
        number, here = self.closed.lowest_open, {g.number for g in ready}
        while number in here or self.closed.contains("", number):
            number += 1
        return number

    def _has_no_gap(self, batch: Sequence[_Group]) -> bool:
        numbered = [g.number for g in batch if g.number >= 0]
        return not numbered or self.closed.num_open_below(numbered[-1]) == len(numbered) - 1


def _by_slot(member: Member) -> tuple[int, str]:
    return member.slot, member.trajectory_id


def _final_offsets(saved: Mapping[str, Any] | None) -> FinalOffsets:
    return FinalOffsets(saved["next"], saved["final"]) if saved else FinalOffsets()
