"""What passes between the thread of Faust's event loop and the worker's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from ..log import Partition, Record

CAPACITY = 4_000


class Exchange:
    """Records and assignments come in, positions go out.

    Faust's side calls `put`, `assign`, `is_full` and `noted`, the worker's side the rest.
    """

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._arrived = threading.Event()
        self._assigned: frozenset[Partition] = frozenset()
        self._noted: dict[Partition, int] = {}

    def put(self, record: Record) -> None:
        """Hand over a record."""
        self._records.append(record)
        self._arrived.set()

    def assign(self, partitions: Iterable[Partition]) -> None:
        """Say which partitions this worker has now."""
        self._assigned = frozenset(partitions)
        self._arrived.set()

    @property
    def is_full(self) -> bool:
        """Whether Faust should wait before it brings more."""
        return len(self._records) >= CAPACITY

    def noted(self) -> dict[Partition, int]:
        """What `note` said since the last call."""
        noted, self._noted = self._noted, {}
        return noted

    @property
    def assigned(self) -> frozenset[Partition]:
        """What `assign` said last."""
        return self._assigned

    def take(self) -> list[Record]:
        """All that has arrived."""
        self._arrived.clear()
        return [self._records.popleft() for _ in range(len(self._records))]

    def wait(self, timeout_s: float) -> None:
        """Until something arrives."""
        self._arrived.wait(timeout_s)

    def note(self, positions: Mapping[Partition, int]) -> None:
        """Say which offsets the group has reached."""
        self._noted = {**self._noted, **positions}
