"""Exact records by their positions, for the join's payloads and the trainer's cuts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...schemas.errors import LogUnavailable, OffsetOutOfRange
from ..log import Partition, Position, Record
from .cluster import Cluster
from .consumer import KafkaConsumer
from .topics import Topics

_FARTHEST = 500
_AHEAD_S, _AHEAD_BYTES = 5.0, 16 * 2**20
_STALLED_S = 30.0
# it reads for moments only, and each beginning waits for the fetch before
_QUICK = {"fetch.wait.max.ms": "5"}


class _Ahead:
    """What a fetch of one partition brought, for a moment."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.size_bytes, self.until = 0, time.monotonic() + _AHEAD_S

    def keep(self, record: Record) -> None:
        """Keep a record, as far as there is room."""
        self.size_bytes += len(record.value or b"") + 200
        if self.size_bytes <= _AHEAD_BYTES:
            self.records[record.offset] = record


class ExactReader:
    """One reader without group; wanted offsets that lie near each other are read in one go.

    A fetch brings more than was asked for. That is kept for a moment: a join that was restored
    asks for one trajectory after the other, and a fetch for each takes a hundred times as long.
    """

    def __init__(self, cluster: Cluster, topics: Topics) -> None:
        self._cluster, self._topics = cluster, topics
        self._consumer: KafkaConsumer | None = None
        self._ahead: dict[Partition, _Ahead] = {}

    def read(self, positions: Sequence[Position]) -> list[Record]:
        """See `Log.read_at`."""
        found = [self._kept(Position(*at)) for at in positions]
        if None not in found:
            return [record for record in found if record is not None]
        for topic, partition, _ in positions:
            self._ahead[Partition(topic, partition)] = _Ahead()
        return self._fetched(positions)

    def _kept(self, at: Position) -> Record | None:
        ahead = self._ahead.get(Partition(at.topic, at.partition))
        if ahead is None or time.monotonic() > ahead.until:
            return None
        return ahead.records.get(at.offset)

    def _fetched(self, positions: Sequence[Position]) -> list[Record]:
        wanted: dict[Partition, list[int]] = defaultdict(list)
        for topic, partition, offset in sorted(set(positions)):
            wanted[Partition(topic, partition)].append(offset)
        self._topics.demand(wanted)
        self._demand_kept(wanted)
        found: dict[Position, Record] = {}
        rounds = {p: _runs(offsets) for p, offsets in wanted.items()}
        while True:
            runs = {p: run for p, left in rounds.items() if (run := next(left, None))}
            if not runs:
                return [found[Position(*at)] for at in positions]
            self._read(runs, found)

    def close(self) -> None:
        """Stop reading."""
        if self._consumer is not None:
            self._consumer.abandon()

    def _demand_kept(self, wanted: dict[Partition, list[int]]) -> None:
        """All must lie between the first kept and the last record, and be visible in time."""
        begins, highest = self._cluster.begins(wanted), self._cluster.highest(wanted)
        for partition, offsets in wanted.items():
            begin, end = begins[partition], highest[partition]
            for offset in (offsets[0], offsets[-1]):
                if not begin <= offset < end:
                    raise _gone(partition, offset, f"the log keeps {begin} to {end - 1}")
        # a transaction is visible a moment after its commit was acknowledged
        deadline = time.monotonic() + _STALLED_S
        while hidden := self._hidden(wanted):
            if time.monotonic() > deadline:
                raise LogUnavailable(f"read_at: a transaction keeps {hidden} from being read")
            time.sleep(0.01)

    def _hidden(self, wanted: dict[Partition, list[int]]) -> list[Partition]:
        ends = self._cluster.ends(wanted)
        return [p for p, offsets in wanted.items() if offsets[-1] >= ends[p]]

    def _read(self, runs: dict[Partition, list[int]], found: dict[Position, Record]) -> None:
        """Read one run of each partition at the same time."""
        if self._consumer is None:
            self._consumer = KafkaConsumer(self._cluster, self._topics, settings=_QUICK)
        consumer = self._consumer
        consumer.assign({partition: run[0] for partition, run in runs.items()}, is_checked=True)
        missing = {p: set(run) for p, run in runs.items()}
        stalled_at = time.monotonic() + _STALLED_S
        while missing:
            for record in consumer.poll(1_000, 100):
                stalled_at = time.monotonic() + _STALLED_S
                offsets = missing.get(Partition(record.topic, record.partition), set())
                if record.offset in offsets:
                    offsets.remove(record.offset)
                    found[record.position] = record
                self._ahead[Partition(record.topic, record.partition)].keep(record)
            at = consumer.positions()
            for partition, offsets in list(missing.items()):
                if offsets and at[partition] > min(offsets):
                    raise _gone(partition, min(offsets), "there is a hole")
                if not offsets:
                    del missing[partition]
            if time.monotonic() > stalled_at:
                raise LogUnavailable(f"read_at: nothing came of {sorted(missing)}")
        consumer.assign({})


def _runs(offsets: list[int]) -> Iterator[list[int]]:
    """Sorted offsets cut where reading through would be longer than beginning anew."""
    run = [offsets[0]]
    for offset in offsets[1:]:
        if offset - run[-1] > _FARTHEST:
            yield run
            run = []
        run.append(offset)
    yield run


def _gone(partition: Partition, offset: int, why: str) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"{partition.topic}[{partition.partition}]@{offset}: {why}. It was compacted, aborted, or "
        "deleted by retention."
    )
