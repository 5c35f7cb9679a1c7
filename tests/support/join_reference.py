"""What the join must give, as a function of the whole script at once, written without its code.

A script is the list of everything one partition reads, in the order in which it is read:
trajectories, rewards and ticks (clock events). Nothing is folded event by event but the choice
between revisions; the close of a group is searched for as the first index at which the set of
events read so far satisfies the rules.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from streamrft.schemas import events as ev
from streamrft.streams.settings import StreamSettings


@dataclass(frozen=True)
class Tick:
    """A clock event."""

    at: int


Step = ev.Trajectory | ev.Reward | Tick


@dataclass
class Result:
    """Everything that counts, without order.

    `experiences`: trajectory_id -> (reward, parts, group, group_experiences); `drops`:
    (trajectory_id, reason, group_experiences) with how often; `counts`: what became of rewards.
    """

    experiences: dict[str, tuple] = field(default_factory=dict)
    drops: Counter[tuple[str, str, int | None]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Script:
    """The script with what can be asked about time."""

    def __init__(self, steps: list[Step]) -> None:
        self.ticks: list[tuple[int, int]] = []
        now = 0
        for i, step in enumerate(steps):
            if isinstance(step, Tick) and step.at > now:
                now = step.at
                self.ticks.append((i, now))
        self.by_group: dict[str, list[tuple[int, ev.Trajectory | ev.Reward]]] = defaultdict(list)
        for i, step in enumerate(steps):
            if isinstance(step, ev.Trajectory):
                self.by_group[step.group_id].append((i, step))
            elif isinstance(step, ev.Reward):
                self.by_group[step.trajectory_id.rsplit(":", 2)[0]].append((i, step))

    def time_at(self, index: int) -> int:
        """Stream time when the step at `index` was read."""
        return max((at for i, at in self.ticks if i <= index), default=0)

    def first_tick(self, after: int, at: float) -> float:
        """Index of the first tick behind index `after` whose time is at or after `at`."""
        return min((i for i, t in self.ticks if i > after and t >= at), default=math.inf)


def reference(steps: list[Step], settings: StreamSettings) -> Result:
    """Experiences, drops and reward counts of a whole script."""
    script, result = Script(steps), Result()
    for events in script.by_group.values():
        start: float = 0
        while start < math.inf:
            life = Life(script, settings, [(i, e) for i, e in events if i >= start])
            start = life.tell(result)
    return result


class Life:
    """A group from its first event until it is forgotten."""

    def __init__(
        self,
        script: Script,
        settings: StreamSettings,
        events: list[tuple[int, ev.Trajectory | ev.Reward]],
    ) -> None:
        self.script, self.settings = script, settings
        self.events = events
        self.trajectories = [(i, e) for i, e in events if isinstance(e, ev.Trajectory)]
        self.rewards = [(i, e) for i, e in events if isinstance(e, ev.Reward)]
        self.first = self.trajectories[0] if self.trajectories else None
        self.late_until = -math.inf
        if self.first is not None:
            self.late_until = script.time_at(self.first[0]) - settings.late_horizon_ms
        self.may_hold = [(i, t) for i, t in self.trajectories if t.produced_at > self.late_until]
        self.is_too_old = bool(self.trajectories) and self.may_hold[:1] != self.trajectories[:1]
        self.close: float = self._close_index()
        self.holders = {} if self.is_too_old else self._holders(self.close)
        self.forgotten: float = self._forget_index()

    # what is known after the step at an index

    def _holders(self, upto: float) -> dict[int, tuple[int, ev.Trajectory]]:
        holders: dict[int, tuple[int, ev.Trajectory]] = {}
        for i, t in self.may_hold:
            if i <= upto:
                holders.setdefault(t.slot, (i, t))
        return holders

    def _is_kept(self, index: int, reward: ev.Reward, until: float) -> bool:
        """Whether an early reward is still remembered when index `until` is reached."""
        at = max(reward.produced_at or 0, self.script.time_at(index))
        return self.script.first_tick(index, at + self.settings.late_horizon_ms) >= until

    def _counting(
        self, holder: tuple[int, ev.Trajectory], upto: float
    ) -> list[tuple[int, ev.Reward]]:
        """Rewards in read order that may score the holder of a slot."""
        arrived, t = holder
        deadline = math.inf if t.reward_deadline_ms is None else t.reward_deadline_ms
        return [
            (i, r)
            for i, r in self._unrepeated()
            if i <= upto
            and not t.is_failed
            and r.trajectory_id == t.trajectory_id
            and r.source in t.reward_sources
            and (i > arrived or self._is_kept(i, r, arrived))
            and (r.produced_at or 0) - t.produced_at <= deadline
        ]

    def _unrepeated(self) -> list[tuple[int, ev.Reward]]:
        """Rewards without those that repeat one that still waits for its slot to be filled."""
        kept: list[tuple[int, ev.Reward]] = []
        for i, r in self.rewards:
            slot = r.trajectory_id.rsplit(":", 1)[0]
            arrived = min(
                (j for j, t in self.may_hold if t.trajectory_id.rsplit(":", 1)[0] == slot),
                default=math.inf,
            )
            is_repeat = i < arrived and any(
                (r.trajectory_id, r.source, r.event_id, r.revision)
                == (k.trajectory_id, k.source, k.event_id, k.revision)
                and self._is_kept(j, k, i)
                for j, k in kept
            )
            if not is_repeat:
                kept.append((i, r))
        return kept

    def _values(self, holder: tuple[int, ev.Trajectory], upto: float) -> dict[str, float]:
        """Standing value by source: the highest revision, the first of equals."""
        standing: dict[str, tuple[int, float]] = {}
        for score in holder[1].scores:
            standing[score.source] = (0, score.value + standing.get(score.source, (0, 0.0))[1])
        for _, r in self._counting(holder, upto):
            if r.source not in standing or r.revision > standing[r.source][0]:
                standing[r.source] = (r.revision, r.value)
        return {source: value for source, (_, value) in standing.items()}

    def _stood(self, holder: tuple[int, ev.Trajectory], upto: float) -> list[ev.Reward]:
        """Rewards that stood for a while: each was the first, or of a higher revision."""
        highest = {score.source: 0 for score in holder[1].scores}
        stood: list[ev.Reward] = []
        for _, r in self._counting(holder, upto):
            if r.revision > highest.get(r.source, -1):
                highest[r.source] = r.revision
                stood.append(r)
        return stood

    def _standing_ids(self) -> set[str]:
        """Event ids of the rewards that stood at the close."""
        ids: dict[tuple[str, str], tuple[int, str]] = {}
        for holder in self.holders.values():
            for score in holder[1].scores:
                ids[holder[1].trajectory_id, score.source] = 0, ""
            for _, r in self._counting(holder, self.close):
                place = r.trajectory_id, r.source
                if r.revision > ids.get(place, (-1, ""))[0]:
                    ids[place] = r.revision, r.event_id
        return {event_id for _, event_id in ids.values()}

    def _is_scored(self, holder: tuple[int, ev.Trajectory], upto: float) -> bool:
        return set(self._values(holder, upto)) == set(holder[1].reward_sources)

    # when it closes and is forgotten

    def _close_index(self) -> float:
        if self.first is None:
            return math.inf
        if self.is_too_old:
            return self.first[0]
        ticks = [(i, ("tick", t)) for i, t in self.script.ticks if i > self.first[0]]
        events = [(i, ("event", 0)) for i, _ in self.events if i >= self.first[0]]
        for i, (kind, time_ms) in sorted([*ticks, *events]):
            due = self._due(i)
            if due is None if kind == "event" else due is not None and due <= time_ms:
                return i
        return math.inf

    def _due(self, upto: int) -> float | None:
        """Latest deadline (with grace) of what is open after index `upto`; None: complete."""
        assert self.first is not None
        holders = self._holders(upto)
        first = self.first[1]
        due: list[float] = []
        if len(holders) < first.group_size:
            wait = first.group_deadline_ms
            due.append(math.inf if wait is None else first.produced_at + wait)
        for holder in holders.values():
            t = holder[1]
            if not t.is_failed and not self._is_scored(holder, upto):
                wait = t.reward_deadline_ms
                due.append(math.inf if wait is None else t.produced_at + wait)
        return max(due) + self.settings.grace_ms if due else None

    def _forget_index(self) -> float:
        """First tick a horizon behind everything that came for the group until then."""
        counted = [self.script.time_at(int(self.close))] if self.close < math.inf else []
        for holder in self.holders.values():
            counted += [r.produced_at or 0 for r in self._stood(holder, self.close)]
        for index, time_ms in self.script.ticks:
            came = [t.produced_at for i, t in self.trajectories if i < index]
            if (
                index > self.close
                and time_ms >= max(counted + came) + self.settings.late_horizon_ms
            ):
                return index
        return math.inf

    # what it gives

    def tell(self, result: Result) -> float:
        """Write this life into the result; the index at which the next one may begin."""
        self._tell_members(result)
        self._tell_others(result)
        for i, r in self.rewards:
            if i <= self.forgotten:
                result.counts[self._fate(i, r)] += 1
        if self.first is None:
            return math.inf
        return self.forgotten + 1

    def _tell_members(self, result: Result) -> None:
        living = {s: h for s, h in sorted(self.holders.items()) if not h[1].is_failed}
        failed = sorted((h for h in self.holders.values() if h[1].is_failed), key=lambda h: h[0])
        is_closed = self.close < math.inf and not self.is_too_old
        for _, t in failed[: None if living else -1]:
            result.drops[t.trajectory_id, "failed", None] += 1
        if not is_closed:
            return
        kept = self._kept(living)
        rewards = {s: self._total(h, self._final_values(h)) for s, h in kept.items()}
        group = tuple((s, h[1].trajectory_id, rewards[s]) for s, h in kept.items())
        for slot, holder in kept.items():
            parts = tuple(sorted(self._final_values(holder).items()))
            result.experiences[holder[1].trajectory_id] = rewards[slot], parts, group, len(kept)
        for slot, (_, t) in living.items():
            if slot not in kept:
                result.drops[t.trajectory_id, "expired", len(kept)] += 1
        if failed and not living:
            result.drops[failed[-1][1].trajectory_id, "failed", 0] += 1

    def _kept(
        self, living: dict[int, tuple[int, ev.Trajectory]]
    ) -> dict[int, tuple[int, ev.Trajectory]]:
        assert self.first is not None
        scored = {s: h for s, h in living.items() if self._is_scored(h, self.close)}
        is_short = len(scored) < len(living) or len(self.holders) < self.first[1].group_size
        if not is_short:
            return scored
        if self.settings.on_deadline == "default":
            return living
        if self.settings.on_deadline == "drop" or len(scored) < self.settings.min_group_size:
            return {}
        return scored

    def _final_values(self, holder: tuple[int, ev.Trajectory]) -> dict[str, float]:
        values = self._values(holder, self.close)
        default = self.settings.default_reward
        return {source: values.get(source, default) for source in holder[1].reward_sources}

    def _total(self, holder: tuple[int, ev.Trajectory], values: dict[str, float]) -> float:
        total = 0.0
        for source, weight in holder[1].reward_sources.items():
            total += weight * values[source]
        return total

    def _tell_others(self, result: Result) -> None:
        """Trajectories that hold no slot: superseded or late, once each."""
        seen = {t.trajectory_id for _, t in self.holders.values()}
        for i, t in self.trajectories:
            if i > self.forgotten or t.trajectory_id in seen:
                continue
            seen.add(t.trajectory_id)
            is_late = i < self.close and (i, t) not in self.may_hold
            is_held = t.slot in self.holders and not is_late
            result.drops[t.trajectory_id, "superseded" if is_held else "late", None] += 1

    def _fate(self, index: int, r: ev.Reward) -> str:
        slot = int(r.trajectory_id.rsplit(":", 2)[1])
        holder = self.holders.get(slot)
        if index > self.close:
            if holder is None or holder[1].trajectory_id == r.trajectory_id:
                return "duplicate" if r.event_id in self._standing_ids() else "late"
            return "superseded"
        if (index, r) not in self._unrepeated():
            return "duplicate"
        arrived = holder[0] if holder else self.close
        if index < arrived and not self._is_kept(index, r, arrived):
            return "orphan"
        if holder is None:
            return "orphan" if self.close < math.inf else "early"
        if holder[1].trajectory_id != r.trajectory_id:
            return "superseded"
        return self._fate_at_holder(index, r, holder)

    def _fate_at_holder(self, index: int, r: ev.Reward, holder: tuple[int, ev.Trajectory]) -> str:
        t = holder[1]
        if t.is_failed or r.source not in t.reward_sources:
            return "refused"
        counting = self._counting(holder, self.close)
        if (index, r) not in counting:
            return "late"
        top = 0 if any(score.source == r.source for score in t.scores) else -1
        own = [(i, k.revision) for i, k in counting if k.source == r.source]
        before = max([top, *(revision for i, revision in own if i < index)])
        if r.revision <= before:
            return "duplicate" if r.revision == before else "superseded"
        is_replaced = any(revision > r.revision for i, revision in own if i > index)
        return "superseded" if is_replaced else "applied"
