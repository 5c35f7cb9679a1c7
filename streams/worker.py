"""The native shell of the join: consume, join, build and commit in one transaction of the log.

Everything that a batch decides (experiences, drops, dead letters, clock events, rewards sent on,
the state of the groups it touched, counters and positions) becomes visible together or not at
all, so a worker killed anywhere goes on exactly once. The layout of the state topic, which
`status` reads, is described in `outbox`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable

from ..schemas.errors import Fenced, StreamrftError
from ..schemas.events import now_ms
from . import faults
from .feeds import Feed, HistoryFeed, LiveFeed
from .join_partition import PartitionJoin
from .log import Partition, Record
from .outbox import Outbox, read_state
from .pipeline import Pipeline
from .process import Process, until_answered
from .settings import StreamSettings

logger = logging.getLogger("streamrft")

POLL_MS, POLL_WITH_DEADLINES_MS = 500, 100
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
METRICS_INTERVAL_S = 1.0


def run_join(process: Process, settings: StreamSettings) -> None:
    """Join this process's share of the partitions until it is asked to stop.

    Raises:
        ConfigError: an unknown filter or priority.
        StreamrftError: one that no retry can mend, such as a position lost to retention.
    """
    worker = JoinWorker(process, settings)
    try:
        worker.run()
    finally:
        worker.close()


class _Held:
    """A partition that waits after a retriable error."""

    def __init__(self) -> None:
        self.num_failures, self.until, self.reason = 0, 0.0, ""

    def fail(self, error: Exception) -> None:
        self.num_failures += 1
        pause = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.num_failures - 1, 10))
        self.until, self.reason = time.monotonic() + pause, str(error)


class JoinWorker:
    """One member of the group `<namespace>.join`. Owned by the thread that owns the log.

    A partition: assigned -> restored -> running <-> held (a retriable error, with back-off)
    """

    def __init__(self, process: Process, settings: StreamSettings) -> None:
        self._process, self._settings = process, settings
        self._log, self._topics = process.log, process.topics
        self._pipeline = Pipeline(settings)
        self._feed_type = LiveFeed if settings.time == "wall" else HistoryFeed
        self._consumer = self._log.consumer(
            group=f"{self._topics.namespace}.join", member=process.name
        )
        self._producer = self._log.producer()
        self._units: dict[int, tuple[PartitionJoin, Feed]] = {}
        self._held: dict[int, _Held] = {}
        self._metrics_at = 0.0

    def run(self) -> None:
        """Work until the process is stopping."""
        sources = [self._topics.name(topic) for topic in self._feed_type.topics]
        self._consumer.subscribe(sources, on_revoke=self._on_revoke)
        while not self._process.is_stopping:
            try:
                records = self._consumer.poll(self._settings.batch_records, self._poll_ms())
                is_moved = self._turn(records)
            except StreamrftError as error:
                if not (error.retriable or isinstance(error, Fenced)):
                    raise
                self._rewind_all(error)
                continue
            self._say(is_moved)

    def close(self) -> None:
        """Leave the group at once."""
        self._consumer.close()
        self._producer.close()

    def _poll_ms(self) -> int:
        needs_time = any(feed.needs_time(unit) for unit, feed in self._units.values())
        return POLL_WITH_DEADLINES_MS if needs_time or self._held else POLL_MS

    def _turn(self, records: list[Record]) -> bool:
        """One batch: each partition by itself, then one transaction for all that went well."""
        by_partition: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_partition[record.partition].append(record)
        moved: dict[int, Outbox] = {}
        now = now_ms()
        for partition in self._assigned():
            if not self._is_ready(partition):
                continue
            was_running = partition in self._units
            try:
                outbox = self._work(partition, by_partition[partition], now)
            except StreamrftError as error:
                if not error.retriable:
                    raise
                self._hold(partition, error)
                continue
            if outbox is not None:
                moved[partition] = outbox
            elif was_running:
                self._held.pop(partition, None)
        if moved:
            self._commit(moved)
        return bool(moved)

    def _work(self, partition: int, records: list[Record], now: int) -> Outbox | None:
        if partition not in self._units:
            self._units[partition] = self._restore(partition)
        unit, feed = self._units[partition]
        unit.now_ms = now
        return unit.finish() if feed.advance(unit, records, now) else None

    def _commit(self, moved: dict[int, Outbox]) -> None:
        positions: dict[Partition, int] = {}
        with self._producer.transaction():
            for partition, outbox in moved.items():
                outbox.send_all(self._producer)
                positions |= self._units[partition][1].positions()
            faults.reach("join.before_commit")
            self._producer.send_positions(self._consumer, positions)
        faults.reach("join.committed")
        for partition in moved:
            self._held.pop(partition, None)

    def _restore(self, partition: int) -> tuple[PartitionJoin, Feed]:
        unit = PartitionJoin(
            self._log,
            self._topics,
            self._settings,
            self._pipeline,
            partition=partition,
            reader=self._process.name,
        )
        unit.restore(*read_state(self._log, self._topics, partition))
        return unit, self._feed_type(self._log, self._consumer, self._topics, partition)

    def _is_ready(self, partition: int) -> bool:
        """Whether the partition runs; a held one is tried again when its pause is over."""
        held = self._held.get(partition)
        if held is None or partition in self._units:
            return True
        if time.monotonic() < held.until:
            return False
        self._consumer.resume(self._sources(partition))
        return True

    def _hold(self, partition: int, error: StreamrftError) -> None:
        """Forget the batch of one partition: back to its committed positions, after a pause."""
        self._held.setdefault(partition, _Held()).fail(error)
        self._rewind([partition])
        self._consumer.pause(self._sources(partition))

    def _rewind_all(self, error: StreamrftError) -> None:
        """The batch of every partition is lost: drop the state, read again what is still ours."""
        logger.warning("%s: batch given up: %s", self._process.name, error)
        until_answered(lambda: self._rewind(self._assigned()), self._process.idle)

    def _rewind(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            sources = self._sources(partition)
            committed = self._consumer.committed(sources)
            begins = self._log.describe({source.topic for source in sources})
            for source in sources:
                first = begins[source.topic].begin[partition]
                self._consumer.seek(source, committed.get(source, first))
            self._units.pop(partition, None)

    def _assigned(self) -> list[int]:
        return sorted({p.partition for p in self._consumer.assignment()})

    def _sources(self, partition: int) -> list[Partition]:
        return [p for p in self._consumer.assignment() if p.partition == partition]

    def _on_revoke(self, partitions: list[Partition]) -> None:
        for _, partition in partitions:
            self._units.pop(partition, None)
            self._held.pop(partition, None)

    def _say(self, is_moved: bool) -> None:
        now = time.monotonic()
        if now - self._metrics_at >= METRICS_INTERVAL_S:
            self._metrics_at = now
            self._process.metrics.update(self._metrics())
        if self._held:
            partition, held = min(self._held.items())
            self._process.idle(f"partition {partition}: {held.reason}")
        elif is_moved:
            self._process.alive()
        elif self._units:
            self._process.idle("trajectories and rewards")
        else:
            self._process.idle("a share of the partitions")

    def _metrics(self) -> dict[str, float]:
        """Counters of this worker's partitions, summed."""
        total: dict[str, float] = defaultdict(float)
        for unit, _ in self._units.values():
            for name, value in unit.counters().items():
                total[name] += value
        total.pop("time_ms", None)
        return dict(total) | {"partitions": float(len(self._units))}
