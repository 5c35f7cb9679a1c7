"""Where each reward goes: into its member, among the early ones, or into a count."""

from __future__ import annotations

from ...schemas.events import Reward
from .closing import fits
from .state import LIVE, Early, Group, Standing

REWARD_COUNTS = ("applied", "duplicate", "late", "orphan", "superseded", "refused", "forwarded")

# keeps the state of a group that somebody floods within one record
MAX_EARLY = 10_000


class RewardBook:
    """Places the rewards of one join and counts what became of them.

    early -> applied | duplicate | late | superseded | orphan | refused
    """

    def __init__(self, *, keeps_late: bool) -> None:
        """`keeps_late`: late rewards that are read before the close amend the group after it."""
        self.keeps_late = keeps_late
        self.counts: dict[str, int] = dict.fromkeys(("rewards", *REWARD_COUNTS), 0)
        self.num_early = 0

    def apply(self, group: Group, slot: int, source: str, standing: Standing) -> None:
        """Give a reward that is read before the close its place or its count."""
        member = group.members[slot]
        if member.state != LIVE or source not in member.sources or not fits(member, standing):
            self.counts["refused"] += 1
            return
        if member.deadline_ms is not None and standing.time_ms > member.deadline_ms:
            self.counts["late"] += 1
            if self.keeps_late:
                trajectory_id = f"{group.group_id}:{slot}:{group.holders[slot]}"
                group.after.append(Early(trajectory_id, source, 0, standing))
            return
        held = member.standing(source)
        if held is not None and standing.revision <= held.revision:
            repeats = standing.revision == held.revision
            self.counts["duplicate" if repeats else "superseded"] += 1
            return
        group.time_ms = max(group.time_ms, standing.time_ms)
        member.stand(source, standing)
        group.num_waiting -= held is None and member.num_missing == 0
        self.counts["superseded" if held is not None and held.event_id else "applied"] += 1

    def keep_early(
        self, group: Group, reward: Reward, standing: Standing, keep_until_ms: int
    ) -> None:
        """Keep a reward until its trajectory comes."""
        early = Early(reward.trajectory_id, reward.source, keep_until_ms, standing)
        if any(_is_same(early, other) for other in group.early):
            self.counts["duplicate"] += 1
            return
        if len(group.early) >= MAX_EARLY:
            self.counts["refused"] += 1
            return
        group.early.append(early)
        self.num_early += 1

    def take_early(self, group: Group, slot: int, *, others_may_come: bool = False) -> None:
        """Rewards that waited for this slot: its holder's get their place, the others never will.

        `others_may_come`: another attempt can still take the slot, so the others wait on.
        """
        prefix = f"{group.group_id}:{slot}:"
        holder = prefix + group.holders[slot]
        waiting, group.early = group.early, []
        for early in waiting:
            if early.trajectory_id == holder:
                self.apply(group, slot, early.source, early.reward)
            elif early.trajectory_id.startswith(prefix) and not others_may_come:
                self.counts["superseded"] += 1
            else:
                group.early.append(early)
        self.num_early -= len(waiting) - len(group.early)

    def orphan_early(self, group: Group, time_ms: int | None = None) -> None:
        """Give up early rewards: those kept until `time_ms`, or all."""
        kept = [] if time_ms is None else [e for e in group.early if e.keep_until_ms > time_ms]
        self.counts["orphan"] += len(group.early) - len(kept)
        self.num_early -= len(group.early) - len(kept)
        group.early = kept


def _is_same(one: Early, other: Early) -> bool:
    return (
        one.reward.event_id == other.reward.event_id
        and one.reward.revision == other.reward.revision
        and one.source == other.source
        and one.trajectory_id == other.trajectory_id
    )
