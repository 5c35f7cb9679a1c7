"""Where a reader of experiences stands, as plain data: final offsets and closed groups. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

MAX_REMEMBERED_IDS = 100_000


class FinalOffsets:
    """Which records of one partition have a final state.

    Its position is the lowest offset read without one, plus the final offsets above it. Holes in
    the offsets (transaction markers) are no obstacle: only offsets that were read are waited for.
    """

    def __init__(self, next_offset: int = 0, final: Iterable[int] = ()) -> None:
        self._next = next_offset
        self._open: deque[int] = deque()
        self._final = set(final)

    def read(self, offset: int) -> bool:
        """Note that `offset` was read; False when it is final already."""
        if offset < self._next:
            return False
        self._next = offset + 1
        self._open.append(offset)
        if offset in self._final:
            self.finish(offset)
            return False
        return True

    def is_new(self, offset: int) -> bool:
        """Whether `read` would take it."""
        return offset >= self._next and offset not in self._final

    def finish(self, offset: int) -> None:
        """Note its final state; an offset that was not read yet will be skipped when it is."""
        if offset >= self.lowest:
            self._final.add(offset)
        while self._open and self._open[0] in self._final:
            self._final.discard(self._open.popleft())

    @property
    def lowest(self) -> int:
        """Where a restart reads on."""
        return self._open[0] if self._open else self._next

    def position(self) -> dict[str, Any]:
        """Plain JSON; `FinalOffsets(p["next"], p["final"])` is this state without what is open."""
        return {"next": self.lowest, "final": sorted(self._final)}


class ClosedGroups:
    """The groups that are trained or dead, compact: publication numbers have no gaps in a run.

    Groups without a number (live traffic, imports) are remembered by id, the newest 100,000.
    """

    def __init__(self, position: Mapping[str, Any] | None = None) -> None:
        saved = position or {"below": 0, "above": [], "ids": [], "num_in_lineage": 0}
        self.num_in_lineage: int = saved["num_in_lineage"]
        self._below: int = saved["below"]
        self._above = set(saved["above"])
        self._ids = OrderedDict.fromkeys(saved["ids"])

    def contains(self, group_id: str, number: int) -> bool:
        """Whether the group was closed."""
        if number < 0:
            return group_id in self._ids
        return number < self._below or number in self._above

    def add(self, group_id: str, number: int, *, in_lineage: bool) -> None:
        """Close it; a repeat changes nothing."""
        if self.contains(group_id, number):
            return
        self.num_in_lineage += in_lineage
        if number < 0:
            self._ids[group_id] = None
            if len(self._ids) > MAX_REMEMBERED_IDS:
                self._ids.popitem(last=False)
            return
        self._above.add(number)
        while self._below in self._above:
            self._above.discard(self._below)
            self._below += 1

    @property
    def lowest_open(self) -> int:
        """The lowest publication number that is not closed."""
        return self._below

    def num_open_below(self, number: int) -> int:
        """How many smaller publication numbers are not closed."""
        closed = self._below + sum(1 for n in self._above if n < number)
        return max(0, number - closed)

    def position(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "below": self._below,
            "above": sorted(self._above),
            "ids": list(self._ids),
            "num_in_lineage": self.num_in_lineage,
        }
