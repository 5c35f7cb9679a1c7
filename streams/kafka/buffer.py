"""Records that were fetched and not handed out yet, partition by partition, served fairly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ..log import Partition, Record
from ..waiting import size_of

MAX_RECORDS, MAX_BYTES = 4_000, 64 * 2**20
# of each paused partition
MAX_PAUSED_RECORDS, MAX_PAUSED_BYTES = 1_000, 16 * 2**20


class Buffer:
    """Where each partition's reading stands. `next` is what `poll` gives next, holes skipped."""

    def __init__(self) -> None:
        self._waiting: dict[Partition, deque[Record]] = {}
        self._named: dict[tuple[str, int], Partition] = {}
        self._reached: dict[Partition, int] = {}
        self._turn = 0
        self._num_records = self._num_bytes = 0
        self.paused: set[Partition] = set()

    def begin(self, partition: Partition, offset: int) -> None:
        """Read a partition from `offset`; what waited of it is forgotten."""
        self.end(partition)
        self._waiting[partition], self._reached[partition] = deque(), offset
        self._named[partition] = partition

    def end(self, partition: Partition) -> None:
        """Forget a partition."""
        self._leave(self._waiting.pop(partition, ()))
        self._reached.pop(partition, None)
        self._named.pop(partition, None)

    def clear(self) -> None:
        """Forget all."""
        for partition in list(self._reached):
            self.end(partition)
        self.paused.clear()

    def __contains__(self, partition: object) -> bool:
        return partition in self._reached

    def __iter__(self) -> Any:
        return iter(self._reached)

    def next(self, partition: Partition) -> int:
        """The next offset to hand out."""
        waiting = self._waiting[partition]
        return waiting[0].offset if waiting else self._reached[partition]

    def take_in(self, message: Any) -> Partition | None:
        """Keep a fetched message; its partition, or None for one that is read no more."""
        partition = self._named.get((message.topic(), message.partition()))
        offset = message.offset()
        if partition is None or offset < self._reached[partition]:
            return None
        value, headers = message.value(), message.headers()
        record = Record(
            partition.topic,
            partition.partition,
            offset,
            message.timestamp()[1],
            message.key(),
            value,
            tuple([(name, held or b"") for name, held in headers]) if headers else (),
        )
        self._waiting[partition].append(record)
        self._reached[partition] = offset + 1
        self._num_records += 1
        self._num_bytes += size_of(value)
        return partition

    def reach(self, partition: Partition, offset: int) -> bool:
        """Nothing lies before `offset`, the end for now; whether a hole was skipped by that."""
        if partition not in self._reached or offset <= self._reached[partition]:
            return False
        self._reached[partition] = offset
        return not self._waiting[partition]

    def _leave(self, records: Sequence[Record]) -> None:
        """Count out what waits no more."""
        self._num_records -= len(records)
        self._num_bytes -= _size_bytes(records)

    @property
    def is_full(self) -> bool:
        """Whether enough waits; what paused partitions hold is bounded elsewhere."""
        held = [self._waiting[p] for p in self.paused if p in self._waiting]
        num_records = self._num_records - sum(map(len, held))
        num_bytes = self._num_bytes - sum(map(_size_bytes, held))
        return num_records >= MAX_RECORDS or num_bytes >= MAX_BYTES

    def overfull(self) -> list[Partition]:
        """Paused partitions that hold so much that no more of them should be fetched."""
        held = {p: self._waiting[p] for p in self.paused if p in self._waiting}
        return [
            p
            for p, waiting in held.items()
            if len(waiting) >= MAX_PAUSED_RECORDS or _size_bytes(waiting) >= MAX_PAUSED_BYTES
        ]

    @property
    def has_records(self) -> bool:
        """Whether `serve` would give something."""
        return any(w for p, w in self._waiting.items() if w and p not in self.paused)

    def serve(self, max_records: int) -> list[Record]:
        """At most `max_records`, in offset order in a partition, each partition its fair share."""
        ready = [p for p, w in self._waiting.items() if w and p not in self.paused]
        if len(ready) > max_records:
            self._turn = (self._turn + max_records) % len(ready)
            ready = (ready[self._turn :] + ready[: self._turn])[:max_records]
        ready.sort(key=lambda p: len(self._waiting[p]))
        records: list[Record] = []
        for i, partition in enumerate(ready):
            waiting = self._waiting[partition]
            share = min(len(waiting), -(-(max_records - len(records)) // (len(ready) - i)))
            records += [waiting.popleft() for _ in range(share)]
        self._leave(records)
        return records

    def unheard(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Those of the partitions that are read and served."""
        return {p for p in partitions if p in self._reached and p not in self.paused}


def _size_bytes(records: Iterable[Record]) -> int:
    return sum([size_of(record.value) for record in records])
