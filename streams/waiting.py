"""Records that came and cannot be used yet, and how much that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .log import Record

CAPACITY, CAPACITY_BYTES = 4_000, 32 * 2**20


class Waiting:
    """Records in the order in which they came, and how much that is."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = deque(records)
        self.num_bytes = sum(size_of(record.value) for record in self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> Record:
        """The next that `take` gives. There must be one."""
        return self._records[0]

    def put(self, record: Record) -> None:
        """Add one."""
        self._records.append(record)
        self.num_bytes += size_of(record.value)

    def take(self) -> Record:
        """Remove the first."""
        record = self._records.popleft()
        self.num_bytes -= size_of(record.value)
        return record

    def behind(self, found: Iterable[Record], offset: int) -> Waiting:
        """`found`, then those from `offset` on."""
        return Waiting([*found, *(r for r in self._records if r.offset >= offset)])

    @property
    def is_full(self) -> bool:
        """Whether that is enough."""
        return len(self._records) >= CAPACITY or self.num_bytes >= CAPACITY_BYTES


def size_of(value: bytes | None) -> int:
    """Bytes in memory of a record with this value, about."""
    return 100 if value is None else len(value) + 100
