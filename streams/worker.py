"""The join worker: consume, join, build and commit in one transaction of the log.

Everything that a batch decides (experiences, drops, dead letters, clock events, rewards sent on,
the state of the groups it touched, counters and positions) becomes visible together or not at
all, so a worker killed anywhere goes on exactly once. The layout of the state topic, which
`status` reads, is described in `outbox`. How records come and what fences a successor is the
business of a `shell`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ..schemas.errors import Fenced, OffsetOutOfRange, StreamrftError
from ..schemas.events import now_ms
from . import faults
from .feeds import Feed, feed_type
from .join_partition import PartitionJoin
from .log import Partition, Record
from .outbox import read_state
from .pipeline import Pipeline
from .process import Process
from .settings import StreamSettings
from .shell import Batch, MakeShell, Shell, may_pass, shell_for

T = TypeVar("T")
logger = logging.getLogger("streamrft")

POLL_MS, POLL_WITH_DEADLINES_MS = 500, 100
FIRST_BACKOFF_S, FENCED_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 1.0, 5.0
METRICS_INTERVAL_S = 1.0
BREATH_S = 0.3


def run_join(
    process: Process, settings: StreamSettings, make_shell: MakeShell | None = None
) -> None:
    """Join this process's share of the partitions until it is asked to stop.

    `make_shell`: the shell, where `settings.engine` does not say it.

    Raises:
        ConfigError: an unknown filter or priority.
        StreamrftError: one that no retry can mend, such as a position lost to retention.
    """
    shell = make_shell(process) if make_shell is not None else shell_for(process, settings)
    try:
        JoinWorker(process, settings, shell).run()
    finally:
        shell.close()


class _Held:
    """A partition that waits after an error that may pass."""

    def __init__(self) -> None:
        self.num_failures, self.until, self.reason = 0, 0.0, ""

    def fail(self, error: Exception) -> None:
        self.num_failures += 1
        # whoever was fenced may not know yet that its partition went to another
        first = FENCED_BACKOFF_S if isinstance(error, Fenced) else FIRST_BACKOFF_S
        pause = min(LONGEST_BACKOFF_S, first * 2 ** min(self.num_failures - 1, 10))
        self.until, self.reason = time.monotonic() + pause, str(error)


class JoinWorker:
    """One member of the group `<namespace>.join`. Owned by the thread that owns the log.

    A partition: assigned -> restored -> running <-> held (an error that may pass, with back-off)
    """

    def __init__(self, process: Process, settings: StreamSettings, shell: Shell) -> None:
        self._process, self._settings, self._shell = process, settings, shell
        self._log, self._topics = process.log, process.topics
        self._pipeline = Pipeline(settings)
        self._feed_type = feed_type(settings)
        self._consumer = shell.consumer
        self._units: dict[int, tuple[PartitionJoin, Feed]] = {}
        self._held: dict[int, _Held] = {}
        self._rewound: set[int] = set()
        self._lost: set[int] = set()
        self._metrics_at = 0.0

    def run(self) -> None:
        """Work until the process is stopping."""
        sources = [self._topics.name(topic) for topic in self._feed_type.topics]
        self._consumer.subscribe(sources, on_revoke=self._on_revoke)
        while not self._process.is_stopping:
            try:
                records = self._consumer.poll(self._settings.batch_records, self._poll_ms())
            except OffsetOutOfRange:
                if not self._go_past_what_is_gone():
                    raise
                continue
            except StreamrftError as error:
                if not may_pass(error):
                    raise
                logger.warning("%s: batch given up: %s", self._process.name, error)
                self._rewind(self._assigned())
                self._process.idle(f"the log: {error}")
                time.sleep(FIRST_BACKOFF_S)
                continue
            self._say(self._turn(records))

    def _poll_ms(self) -> int:
        needs_time = any(feed.needs_time(unit) for unit, feed in self._units.values())
        return POLL_WITH_DEADLINES_MS if needs_time or self._held else POLL_MS

    def _turn(self, records: list[Record]) -> bool:
        """One batch: each partition by itself; what went well is committed."""
        by_partition: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_partition[record.partition].append(record)
        moved: dict[int, Batch] = {}
        now = now_ms()
        self._lost.clear()
        for partition in self._assigned():
            if not self._is_ready(partition):
                continue
            was_running = partition in self._units
            try:
                batch = self._work(partition, by_partition[partition], now)
            except StreamrftError as error:
                if not may_pass(error):
                    raise
                self._hold(partition, error)
                continue
            if batch is not None:
                moved[partition] = batch
            elif was_running:
                self._held.pop(partition, None)
        if moved:
            self._commit(moved)
        return bool(moved)

    def _work(self, partition: int, records: list[Record], now: int) -> Batch | None:
        if partition not in self._units:
            self._restore(partition)
            records = []  # they lie below its position, or come again from there
        if partition not in self._units:
            return None  # it went to another while its state was read
        unit, feed = self._units[partition]
        unit.now_ms = now
        if not feed.advance(unit, records, now):
            return None
        positions = feed.positions()
        return Batch(unit.finish({t: positions[s] for t, s in self._places(partition)}), positions)

    def _commit(self, moved: dict[int, Batch]) -> None:
        failed = self._shell.commit(moved)
        for partition, error in failed.items():
            logger.warning("%s: batch given up: %s", self._process.name, error)
            self._hold(partition, error)
        if not failed:
            faults.reach("join.committed")
        for partition in moved.keys() - failed:
            self._held.pop(partition, None)

    def _restore(self, partition: int) -> None:
        """Make a partition's unit from the log, and read on where its state ends."""
        self._shell.claim(partition)
        unit = PartitionJoin(
            self._log,
            self._topics,
            self._settings,
            self._pipeline,
            partition=partition,
            reader=self._process.name,
        )
        state = read_state(self._log, self._topics, partition, through=self._breathing)
        unit.restore(self._breathing(state.groups), state.counters)
        if partition in self._lost:
            return
        self._go_to(partition, state.positions)
        feed = self._feed_type(self._log, self._consumer, self._topics, partition)
        self._units[partition] = unit, feed

    def _breathing(self, values: Iterable[T]) -> Iterator[T]:
        """Pass values on, and stay a member of the group however long that takes."""
        breath_at = time.monotonic() + BREATH_S
        for value in values:
            yield value
            if time.monotonic() > breath_at:
                self._consumer.poll(0)
                self._process.idle("the state of its groups")
                breath_at = time.monotonic() + BREATH_S

    def _go_to(self, partition: int, positions: Mapping[str, int]) -> None:
        at = self._consumer.positions()
        for topic, source in self._places(partition):
            wanted = positions.get(topic)
            wanted = self._first(source) if wanted is None else self._kept(source, wanted)
            if partition in self._rewound or at.get(source) != wanted:
                self._consumer.seek(source, wanted)
        self._rewound.discard(partition)

    def _first(self, source: Partition) -> int:
        """Where a partition without state begins."""
        committed = self._consumer.committed([source]).get(source)
        if committed is not None:
            return self._kept(source, committed)
        return self._log.describe([source.topic])[source.topic].begin[source.partition]

    def _kept(self, source: Partition, offset: int) -> int:
        """The offset, or the first kept one behind it where losing what lies between is allowed.

        Raises:
            OffsetOutOfRange: retention deleted what was not joined.
        """
        first = self._log.describe([source.topic])[source.topic].begin[source.partition]
        if offset >= first:
            return offset
        lost = (
            f"{source.topic}[{source.partition}]: retention deleted offsets {offset} to "
            f"{first - 1} before they were joined"
        )
        if not self._settings.skip_lost:
            topic = self._topics.short(source.topic)
            raise OffsetOutOfRange(
                f"{lost}. Raise event_log.retention.{topic}, and set streams.skip_lost: true "
                f"to go on with what is kept: what they held is not trained on."
            )
        logger.warning("%s; going on at %d", lost, first)
        return first

    def _go_past_what_is_gone(self) -> bool:
        """Read on at the first kept records; whether that helps. Raises as `_kept`."""
        moved = False
        for source, offset in self._consumer.positions().items():
            kept = self._kept(source, offset)
            if kept != offset:
                self._consumer.seek(source, kept)
                moved = True
        return moved

    def _is_ready(self, partition: int) -> bool:
        """Whether the partition runs; a held one is tried again when its pause is over."""
        if partition in self._lost:
            return False  # the records of this turn are of its former life
        held = self._held.get(partition)
        if held is None or partition in self._units:
            return True
        if time.monotonic() < held.until:
            return False
        self._consumer.resume(self._sources(partition))
        return True

    def _hold(self, partition: int, error: StreamrftError) -> None:
        """Forget the batch of one partition: back to its committed state, after a pause."""
        self._held.setdefault(partition, _Held()).fail(error)
        self._rewind([partition])
        self._consumer.pause(self._sources(partition))

    def _rewind(self, partitions: Iterable[int]) -> None:
        """The batch is lost: drop the state, to read it again from the log."""
        for partition in partitions:
            self._units.pop(partition, None)
            self._rewound.add(partition)

    def _assigned(self) -> list[int]:
        return sorted({p.partition for p in self._consumer.assignment()})

    def _sources(self, partition: int) -> list[Partition]:
        return [p for p in self._consumer.assignment() if p.partition == partition]

    def _places(self, partition: int) -> list[tuple[str, Partition]]:
        return [(t, Partition(self._topics.name(t), partition)) for t in self._feed_type.topics]

    def _on_revoke(self, partitions: list[Partition]) -> None:
        for _, partition in partitions:
            self._units.pop(partition, None)
            self._held.pop(partition, None)
            self._rewound.discard(partition)
            self._lost.add(partition)

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
            self._process.idle(self._shell.waits_for())

    def _metrics(self) -> dict[str, float]:
        """Counters of this worker's partitions, summed, and the shell's own."""
        total: dict[str, float] = defaultdict(float)
        for unit, _ in self._units.values():
            for name, value in unit.counters().items():
                total[name] += value
        total.pop("time_ms", None)
        return {**total, **self._shell.metrics(), "partitions": float(len(self._units))}
