"""When groups next need attention: a heap with lazy removal."""

from __future__ import annotations

import heapq


class Deadlines:
    """At most one instant a key; keys come out in order of (instant, key)."""

    def __init__(self) -> None:
        self._when: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """Number of keys that have an instant."""
        return len(self._when)

    @property
    def next_ms(self) -> int | None:
        """The earliest instant; None when there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def set(self, key: str, when_ms: int | None) -> None:
        """Give `key` its only instant; None takes it out."""
        if when_ms is None:
            self._when.pop(key, None)
            return
        if self._when.get(key) == when_ms:
            return
        self._when[key] = when_ms
        heapq.heappush(self._heap, (when_ms, key))
        if len(self._heap) > 64 + 2 * len(self._when):
            self._heap = [(when, k) for k, when in self._when.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_ms: int) -> list[str]:
        """Take out and return every key whose instant is at or before `now_ms`."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            if not self._is_stale(entry):
                del self._when[entry[1]]
                due.append(entry[1])
        return due

    def _is_stale(self, entry: tuple[int, str]) -> bool:
        return self._when.get(entry[1]) != entry[0]
