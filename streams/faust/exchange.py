"""What passes between the thread of Faust's event loop and the worker's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from ..log import Partition, Record
from ..waiting import CAPACITY, CAPACITY_BYTES, size_of


class Exchange:
    """Records and assignments come in, positions go out.

    Faust's side calls `put`, `assign`, `refuse`, `is_full` and `noted`, the worker's side the rest.
    """

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        # each written by one of the two threads
        self._bytes_put = self._bytes_taken = 0
        self._arrived = threading.Event()
        self._assigned: frozenset[Partition] = frozenset()
        self._noted: dict[Partition, int] = {}
        self._refusal = ""

    def put(self, record: Record) -> None:
        """Hand over a record."""
        self._records.append(record)
        self._bytes_put += size_of(record.value)
        self._arrived.set()

    def assign(self, partitions: Iterable[Partition]) -> None:
        """Say which partitions this worker has now."""
        self._assigned = frozenset(partitions)
        if self._assigned:
            self._refusal = ""
        self._arrived.set()

    def refuse(self, reason: str) -> None:
        """Say what keeps this worker out of its group."""
        self._refusal = reason

    @property
    def is_full(self) -> bool:
        """Whether Faust should wait before it brings more."""
        num_bytes = self._bytes_put - self._bytes_taken
        return len(self._records) >= CAPACITY or num_bytes >= CAPACITY_BYTES

    def noted(self) -> dict[Partition, int]:
        """What `note` said since the last call."""
        # one by one, so that none is lost which the other thread adds meanwhile
        return dict(self._noted.popitem() for _ in range(len(self._noted)))

    @property
    def assigned(self) -> frozenset[Partition]:
        """What `assign` said last."""
        return self._assigned

    @property
    def refusal(self) -> str:
        """What `refuse` said last, until there is an assignment."""
        return self._refusal

    def take(self) -> list[Record]:
        """All that has arrived."""
        self._arrived.clear()
        records = [self._records.popleft() for _ in range(len(self._records))]
        self._bytes_taken += sum(size_of(record.value) for record in records)
        return records

    def wait(self, timeout_s: float) -> None:
        """Until something arrives."""
        self._arrived.wait(timeout_s)

    def note(self, positions: Mapping[Partition, int]) -> None:
        """Say which offsets the group has reached."""
        self._noted.update(positions)
