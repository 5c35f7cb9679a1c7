"""What passes between the thread of Faust's event loop and the worker's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from ..log import Partition, Record

CAPACITY, CAPACITY_BYTES = 4_000, 32 * 2**20


class Waiting:
    """Records in the order in which they came, and how much that is."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = deque(records)
        self.num_bytes = sum(map(size_of, self._records))

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """The offset of the first. There must be one."""
        return self._records[0].offset

    def put(self, record: Record) -> None:
        """Add one."""
        self._records.append(record)
        self.num_bytes += size_of(record)

    def take(self) -> Record:
        """Remove the first."""
        record = self._records.popleft()
        self.num_bytes -= size_of(record)
        return record

    def behind(self, found: Iterable[Record], offset: int) -> Waiting:
        """`found`, then those from `offset` on."""
        return Waiting([*found, *(r for r in self._records if r.offset >= offset)])

    @property
    def is_full(self) -> bool:
        """Whether that is enough."""
        return len(self._records) >= CAPACITY or self.num_bytes >= CAPACITY_BYTES


def size_of(record: Record) -> int:
    """Bytes of a record in memory, about."""
    return 100 if record.value is None else len(record.value) + 100


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
        self._bytes_put += size_of(record)
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
        self._bytes_taken += sum(map(size_of, records))
        return records

    def wait(self, timeout_s: float) -> None:
        """Until something arrives."""
        self._arrived.wait(timeout_s)

    def note(self, positions: Mapping[Partition, int]) -> None:
        """Say which offsets the group has reached."""
        self._noted.update(positions)
