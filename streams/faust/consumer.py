"""The worker's reading from Faust: positions are our own, and gaps are read from the log.

Faust was measured to lose records on graceful rebalances, at kills and in `exactly_once`
(docs/architecture.md), so what it delivers is taken as fast news of what the log holds: a record
below the next position is a repeat, one above it means that the log is read in between, and a
partition that stands still before its end is read to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...schemas.errors import LogError, LogUnavailable
from ..log import Consumer, Log, Partition, Record
from ..waiting import CAPACITY, CAPACITY_BYTES, Waiting, size_of
from .exchange import Exchange
from .membership import Membership

LINGER_S = 0.05
LOOK_INTERVAL_S = 0.5
_GAP_RECORDS, _GAP_CHUNK, _GAP_POLL_MS, _GAP_TIMEOUT_S = 2_000, 200, 200, 20.0

Rebalanced = Callable[[list[Partition]], None]


class _Reading:
    """One partition: the next offset to hand out, and what waits.

    The log has shown that nothing but what waits lies below `proven`.
    """

    def __init__(self, offset: int) -> None:
        self.waiting = Waiting()
        self.seek(offset)

    def seek(self, offset: int) -> None:
        self.next = self.proven = offset
        self.seen_at = -1

    def skip_repeats(self) -> int:
        """Leave out what was handed out already; how much that was."""
        num = 0
        while self.waiting and self.waiting.first.offset < self.next:
            self.waiting.take()
            num += 1
        if not self.waiting or self.waiting.first.offset >= self.proven:
            self.next = max(self.next, self.proven)
        return num

    @property
    def has_gap(self) -> bool:
        """Whether the first record that waits is not the next one, for all that is known."""
        return bool(self.waiting) and self.waiting.first.offset > max(self.next, self.proven - 1)

    def take(self, num: int) -> list[Record]:
        """The next records up to a gap."""
        taken: list[Record] = []
        while len(taken) < num:
            self.skip_repeats()
            if not self.waiting or self.has_gap:
                break
            taken.append(self.waiting.take())
            self.next = taken[-1].offset + 1
        self.skip_repeats()
        return taken


class FaustConsumer:
    """See `Consumer`. Of the worker's thread; a partition is served once it was sought.

    A partition: assigned -> positioned (by `seek`) -> revoked
    """

    def __init__(self, log: Log, membership: Membership, exchange: Exchange) -> None:
        self._log, self._membership, self._exchange = log, membership, exchange
        self._topics: tuple[str, ...] = ()
        self._on_assign: Rebalanced | None = None
        self._on_revoke: Rebalanced | None = None
        self._assigned: set[Partition] = set()
        self._readings: dict[Partition, _Reading] = {}
        self._paused: set[Partition] = set()
        self._unplaced: dict[Partition, Waiting] = {}
        self._reader: Consumer | None = None
        self._looked_at = 0.0
        self.metrics = {"gaps": 0, "gap_records": 0, "repeats": 0}

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: Rebalanced | None = None,
        on_revoke: Rebalanced | None = None,
    ) -> None:
        """See `Consumer.subscribe`. Starts Faust."""
        counts = {n: len(found.end) for n, found in self._log.describe(topics).items()}
        if len(set(counts.values())) != 1:
            raise LogError(
                f"topics with different numbers of partitions cannot be joined ({counts}). "
                "Create the run's topics with as many partitions each."
            )
        self._topics = tuple(sorted(topics))
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._membership.start(self._topics)

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Not here: Faust assigns."""
        raise LogError("assign: Faust assigns partitions; open a consumer of the log instead")

    def assignment(self) -> list[Partition]:
        """See `Consumer.assignment`."""
        return sorted(self._assigned)

    def positions(self) -> dict[Partition, int]:
        """See `Consumer.positions`. Only of partitions that were sought."""
        return {p: reading.next for p, reading in self._readings.items()}

    def seek(self, partition: Partition, offset: int) -> None:
        """See `Consumer.seek`."""
        reading = self._readings.get(partition)
        if reading is None:
            reading = self._readings[partition] = _Reading(offset)
            reading.waiting = self._unplaced.pop(partition, Waiting())
        reading.seek(offset)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.pause`. What comes meanwhile may be left out: it is read as a gap."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.resume`."""
        self._paused.difference_update(partitions)

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """Tell the group's offsets to whoever looks at them; the state has the true ones."""
        self._exchange.note(positions)

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """None: positions are a part of the state."""
        return {}

    def close(self) -> None:
        """See `Consumer.close`."""
        self._membership.stop()
        if self._reader is not None:
            self._reader.close()

    # --- reading

    def poll(self, max_records: int = 500, timeout_ms: int = 0) -> list[Record]:
        """See `Consumer.poll`. Waits a moment for more, as each batch is a transaction."""
        self._membership.check()
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            self._follow_assignment()
            self._sort_in()
            now = time.monotonic()
            num_ready = sum(len(r.waiting) for r in self._served().values())
            if num_ready:
                deadline = min(deadline, now + LINGER_S)
            if num_ready >= max_records or now >= deadline or self._has_enough():
                return self._serve(max_records)
            self._exchange.wait(deadline - now)

    def _served(self) -> dict[Partition, _Reading]:
        return {p: r for p, r in self._readings.items() if p not in self._paused}

    def _follow_assignment(self) -> None:
        found = self._exchange.assigned
        numbers = [p for t, p in found if t == self._topics[0]]
        whole = {Partition(t, p) for p in numbers for t in self._topics}
        lost, new = self._assigned - whole, whole - self._assigned
        self._assigned = whole
        for partition in lost:
            self._readings.pop(partition, None)
            self._unplaced.pop(partition, None)
            self._paused.discard(partition)
        if lost and self._on_revoke is not None:
            self._on_revoke(sorted(lost))
        if new and self._on_assign is not None:
            self._on_assign(sorted(new))

    def _sort_in(self) -> None:
        """Take over what Faust brought, while there is room: it waits when its side is full."""
        if self._has_enough():
            return
        served = self._served()
        for record in self._exchange.take():
            place = Partition(record.topic, record.partition)
            if place not in self._assigned:
                continue
            reading = self._readings.get(place)
            if reading is not None:
                waiting = reading.waiting
            else:
                waiting = self._unplaced.setdefault(place, Waiting())
            # what is left out of those that cannot be handed out now is read as a gap
            if place in served or not waiting.is_full:
                waiting.put(record)

    def _has_enough(self) -> bool:
        waiting = [reading.waiting for reading in self._served().values()]
        num_bytes = sum(w.num_bytes for w in waiting)
        return sum(map(len, waiting)) >= CAPACITY or num_bytes >= CAPACITY_BYTES

    def _serve(self, max_records: int) -> list[Record]:
        self.metrics["repeats"] += sum(r.skip_repeats() for r in self._served().values())
        self._look_at_ends()
        records: list[Record] = []
        served = sorted(self._served().items(), key=lambda found: len(found[1].waiting))
        has_filled = False
        for i, (place, reading) in enumerate(served):
            share = -(-(max_records - len(records)) // (len(served) - i))
            # with enough at hand they are filled one at a time
            if reading.has_gap and not (has_filled and self._has_enough()):
                self._fill(place, reading, reading.waiting.first.offset)
                has_filled = True
            records += reading.take(share)
        return records

    def _look_at_ends(self) -> None:
        """Now and then, see whether a partition with nothing waiting stands before its end."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_INTERVAL_S:
            return
        self._looked_at = now
        idle = {p: r for p, r in self._served().items() if not r.waiting}
        for place, end in self._log.end_offsets(idle).items():
            reading = idle[place]
            # Faust has had the time from one look to the next to bring it
            is_standing = reading.next < end and reading.seen_at == reading.next
            if reading.next > end:  # the topic was made anew, or lost what was acknowledged
                self._reader_at(place, reading.next).poll(1)
            if is_standing and not self._has_enough():
                self._fill(place, reading, end)
            reading.seen_at = reading.next

    def _fill(self, place: Partition, reading: _Reading, end: int) -> None:
        """Read a partition from the log, from its next offset at least to `end`."""
        found, proven = self._read(place, reading.next, end)
        self.metrics["gaps"] += 1
        self.metrics["gap_records"] += len(found)
        reading.waiting, reading.proven = reading.waiting.behind(found, proven), proven

    def _read(self, place: Partition, start: int, end: int) -> tuple[list[Record], int]:
        """Records from `start` on, and the offset up to which the log has no others.

        Raises:
            OffsetOutOfRange: retention deleted `start`. LogUnavailable: try again.
        """
        reader = self._reader_at(place, start)
        records: list[Record] = []
        deadline = time.monotonic() + _GAP_TIMEOUT_S
        num_bytes = 0
        while (reached := reader.positions()[place]) < end:
            if len(records) >= _GAP_RECORDS or num_bytes >= CAPACITY_BYTES:
                break
            more = reader.poll(_GAP_CHUNK, _GAP_POLL_MS)
            records += more
            num_bytes += sum(size_of(record.value) for record in more)
            if time.monotonic() > deadline:
                raise LogUnavailable(
                    f"{place.topic}[{place.partition}]@{start}: a gap up to {end} could not be "
                    f"read in {_GAP_TIMEOUT_S:g} s; {reached} was reached"
                )
        return records, reached

    def _reader_at(self, place: Partition, offset: int) -> Consumer:
        """Its first poll raises OffsetOutOfRange for an offset that the log does not have."""
        if self._reader is None:
            self._reader = self._log.consumer()
        self._reader.assign({place: offset})
        return self._reader
