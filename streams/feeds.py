"""In which order a partition's records and clock events reach the join: live, or over history.

A feed applies what is ready and says how far it got; the worker commits exactly that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..schemas import codec
from ..schemas.errors import InvalidEvent, UndecodableRecord
from ..schemas.events import Clock, Reward, Trajectory
from ..schemas.topics import Topics
from .join_partition import PartitionJoin
from .log import Consumer, Log, Partition, Record
from .settings import StreamSettings
from .waiting import Waiting

CLOCK_INTERVAL_MS = 1_000
SETTLE_S = 2.0
_FORGETTING_STEPS = 20


class Feed(Protocol):
    """Drives one partition. Made anew whenever its partition is restored."""

    def advance(self, unit: PartitionJoin, records: Sequence[Record], now_ms: int) -> bool:
        """Apply what can be applied; whether anything was."""
        ...

    def positions(self) -> dict[Partition, int]:
        """Next offsets that were not applied."""
        ...

    def needs_time(self, unit: PartitionJoin) -> bool:
        """Whether something happens here although no record comes."""
        ...


class LiveFeed:
    """Records as they come; a clock event once read past the ends seen at its time."""

    topics = ("trajectories", "rewards")

    def __init__(self, log: Log, consumer: Consumer, topics: Topics, partition: int) -> None:
        self._log, self._consumer = log, consumer
        self._sources = {Partition(topics.name(t), partition): t for t in self.topics}
        self._asked: tuple[int, Mapping[Partition, int]] | None = None

    def advance(self, unit: PartitionJoin, records: Sequence[Record], now_ms: int) -> bool:
        """See `Feed.advance`."""
        for record in records:
            unit.take(record)
        return self._tick(unit, now_ms) or bool(records)

    def positions(self) -> dict[Partition, int]:
        """See `Feed.positions`."""
        reached = self._consumer.positions()
        return {source: reached[source] for source in self._sources if source in reached}

    def needs_time(self, unit: PartitionJoin) -> bool:
        """See `Feed.needs_time`."""
        return unit.join.has_open_deadline

    def _tick(self, unit: PartitionJoin, now_ms: int) -> bool:
        if self._asked is None:
            if not self._is_due(unit, now_ms):
                return False
            self._asked = now_ms, self._log.end_offsets(self._sources)
        time_ms, ends = self._asked
        reached = self.positions()
        if any(reached.get(source, 0) < end for source, end in ends.items()):
            return False
        self._asked = None
        unit.clock(time_ms, {self._sources[s]: offset for s, offset in reached.items()})
        return True

    def _is_due(self, unit: PartitionJoin, now_ms: int) -> bool:
        """Every second while a group may close by time, seldom to forget what is old."""
        since = now_ms - unit.join.time_ms
        if unit.join.has_open_deadline:
            return since >= CLOCK_INTERVAL_MS
        forgetting = unit.join.next_forgetting_ms
        if forgetting is None or forgetting > now_ms:
            return False
        return since >= max(CLOCK_INTERVAL_MS, unit.late_horizon_ms // _FORGETTING_STEPS)


class HistoryFeed:
    """A partition read again: recorded clock events at their positions, else by event time.

    With recorded clock events, groups close where they closed live. Without, records are merged
    by event time, deadlines fire on the way, and the end (nothing new for a while) closes the rest.
    """

    topics = ("trajectories", "rewards", "clock")

    def __init__(self, log: Log, consumer: Consumer, topics: Topics, partition: int) -> None:
        self._log, self._consumer = log, consumer
        self._sources = {t: Partition(topics.name(t), partition) for t in self.topics}
        self._waiting: dict[str, Waiting] = {t: Waiting() for t in self.topics}
        self._names = {topics.name(t): t for t in self.topics}
        self._has_clocks = log.end_offsets([self._sources["clock"]])[self._sources["clock"]] > 0
        self._quiet_since: float | None = None
        self._paused: set[Partition] = set()

    def advance(self, unit: PartitionJoin, records: Sequence[Record], now_ms: int) -> bool:
        """See `Feed.advance`."""
        for record in records:
            self._waiting[self._names[record.topic]].put(record)
        self._throttle()
        before = self.positions()
        if self._has_clocks:
            self._follow_clocks(unit)
            return self.positions() != before
        self._merge(unit)
        is_moved = self.positions() != before
        return self._end(unit, is_moved) or is_moved

    def positions(self) -> dict[Partition, int]:
        """See `Feed.positions`."""
        return {source: self._applied(topic) for topic, source in self._sources.items()}

    def needs_time(self, unit: PartitionJoin) -> bool:
        """See `Feed.needs_time`."""
        return unit.join.num_open > 0

    def _throttle(self) -> None:
        """Leave a topic unread while too much of it waits for another."""
        full = {self._sources[t] for t, w in self._waiting.items() if w.is_full}
        self._consumer.pause(full - self._paused)
        self._consumer.resume(self._paused - full)
        self._paused = full

    def _applied(self, topic: str) -> int:
        waiting = self._waiting[topic]
        source = self._sources[topic]
        return waiting.first.offset if waiting else self._consumer.positions().get(source, 0)

    def _is_at_end(self, topic: str) -> bool:
        source = self._sources[topic]
        if self._waiting[topic]:
            return False
        return self._consumer.positions().get(source, 0) >= self._log.end_offsets([source])[source]

    def _follow_clocks(self, unit: PartitionJoin) -> None:
        while self._waiting["clock"]:
            record = self._waiting["clock"].first
            try:
                clock = codec.decode(record.value, Clock)
            except UndecodableRecord as error:
                unit.dead_letter(record, error)
                self._waiting["clock"].take()
                continue
            if not self._reach(unit, clock.positions):
                return
            self._waiting["clock"].take()
            unit.tick(clock.time_ms)
        if self._is_at_end("clock"):
            self._reach(unit, {})

    def _reach(self, unit: PartitionJoin, positions: Mapping[str, int]) -> bool:
        """Apply records before the positions (all that came, without); whether that is all."""
        for topic in ("trajectories", "rewards"):
            waiting = self._waiting[topic]
            end = positions.get(topic, 0) if positions else math.inf
            while waiting and waiting.first.offset < end:
                unit.take(waiting.take())
        return all(self._applied(t) >= at for t, at in positions.items() if t in self._sources)

    def _merge(self, unit: PartitionJoin) -> None:
        """Apply the older head of both topics, as long as both heads are known."""
        both = [self._waiting[t] for t in ("trajectories", "rewards")]
        while any(both):
            for topic in ("trajectories", "rewards"):
                if not self._waiting[topic] and not self._is_at_end(topic):
                    return
            waiting = min((w for w in both if w), key=lambda w: _time_of(w.first))
            unit.tick(_time_of(waiting.first) - 1)
            unit.take(waiting.take())

    def _end(self, unit: PartitionJoin, is_moved: bool) -> bool:
        if is_moved or not unit.join.num_open:
            self._quiet_since = None
            return False
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < SETTLE_S:
            return False
        if not (self._is_at_end("trajectories") and self._is_at_end("rewards")):
            return False
        unit.close_all()
        return True


def feed_type(settings: StreamSettings) -> type[LiveFeed | HistoryFeed]:
    """What drives a partition; its `topics` are what a worker reads, by catalogue name."""
    return LiveFeed if settings.time == "wall" else HistoryFeed


def _time_of(record: Record) -> int:
    """Event time; the log's where the record has none or cannot be read."""
    try:
        event = codec.decode(record.value, Trajectory, Reward)
    except (InvalidEvent, UndecodableRecord):
        return record.timestamp_ms
    return record.timestamp_ms if event.produced_at is None else event.produced_at
