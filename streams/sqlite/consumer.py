"""Reading the embedded log: as a member of a group, or partitions named by the reader."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...schemas.errors import LogError, OffsetOutOfRange
from ..log import Partition, Record
from .group import Membership
from .records import read_run
from .store import Store
from .topics import TopicTable

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.02
_MAX_POLL_BYTES = 64 * 2**20

Rebalanced = Callable[[list[Partition]], None]


class SqliteConsumer:
    """See `Consumer`."""

    def __init__(
        self,
        store: Store,
        topics: TopicTable,
        group: str | None,
        member: str | None,
        session_ms: int,
    ) -> None:
        self._store, self._topics = store, topics
        self._group, self._member, self._session_ms = group, member, session_ms
        self._membership: Membership | None = None
        self._subscribed: tuple[str, ...] = ()
        self._on_assign: Rebalanced | None = None
        self._on_revoke: Rebalanced | None = None
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._ids: dict[tuple[int, int], Partition] = {}
        self._turn = 0
        self._read_version: tuple[int, int] | None = None
        self.is_closed = False

    def is_on(self, store: Store) -> bool:
        """Whether it reads through this connection."""
        return self._store is store

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: Rebalanced | None = None,
        on_revoke: Rebalanced | None = None,
    ) -> None:
        """See `Consumer.subscribe`. The group is joined by the first `poll`."""
        if self._group is None:
            raise LogError("subscribe: this consumer has no group; use assign, or name a group")
        if self._membership is not None or self._positions:
            raise LogError(f"group {self._group!r}: this consumer reads already; open another")
        counts = {name: self._topics.get(name).spec.num_partitions for name in topics}
        if len(set(counts.values())) != 1:
            raise LogError(
                f"group {self._group!r}: topics with different numbers of partitions cannot be "
                f"read together ({counts}). Read each in its own group."
            )
        self._subscribed = tuple(sorted(counts))
        self._on_assign, self._on_revoke = on_assign, on_revoke
        (num_shares,) = set(counts.values())
        self._membership = Membership(
            self._store, self._group, self._member, self._subscribed, num_shares, self._session_ms
        )

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """See `Consumer.assign`. A second call replaces the first."""
        if self._membership is not None:
            raise LogError(f"group {self._group!r}: a subscribed consumer cannot assign")
        self._ids = self._topics.ids(positions)
        self._positions = {Partition(*partition): at for partition, at in positions.items()}
        self._paused.clear()
        self._read_version = None

    def assignment(self) -> list[Partition]:
        """See `Consumer.assignment`."""
        return sorted(self._positions)

    def positions(self) -> dict[Partition, int]:
        """See `Consumer.positions`."""
        return dict(self._positions)

    def seek(self, partition: Partition, offset: int) -> None:
        """See `Consumer.seek`."""
        self._demand_assigned(partition)
        self._positions[partition] = offset
        self._read_version = None

    def pause(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.pause`."""
        for partition in partitions:
            self._demand_assigned(partition)
            self._paused.add(Partition(*partition))

    def resume(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.resume`."""
        self._paused.difference_update(partitions)
        self._read_version = None

    def _demand_assigned(self, partition: Partition) -> None:
        if partition not in self._positions:
            raise LogError(f"{partition.topic}[{partition.partition}]: is not assigned")

    def poll(self, max_records: int = 500, timeout_ms: int = 0) -> list[Record]:
        """See `Consumer.poll`."""
        if self.is_closed:
            raise LogError("poll: this consumer is closed; open another")
        deadline = time.monotonic() + timeout_ms / 1000
        wait_s = _FIRST_WAIT_S
        while True:
            if self._membership is not None:
                self._follow_group(self._membership)
            if not max_records:
                return []
            version = self._store.version()
            if version != self._read_version:
                records = self._read(max_records)
                if records:
                    return records
                self._read_version = version
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return []
            time.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    def _read(self, max_records: int) -> list[Record]:
        with self._store.reading() as db:
            ready = self._ready(max_records)
            records: list[Record] = []
            num_bytes = 0
            for i, (place, partition, at, end) in enumerate(ready):
                share = -(-(max_records - len(records)) // (len(ready) - i))
                found, size = read_run(
                    db, place, partition.topic, at, share, _MAX_POLL_BYTES - num_bytes
                )
                num_bytes += size
                is_all = len(found) < share and num_bytes < _MAX_POLL_BYTES
                # behind the last record a compacted topic may end in a hole
                self._positions[partition] = end if is_all else found[-1].offset + 1
                records += found
                if num_bytes >= _MAX_POLL_BYTES:
                    break
        return records

    def _ready(self, max_records: int) -> list[tuple[tuple[int, int], Partition, int, int]]:
        """Partitions with something to read, those with the least first, in turn when too many."""
        ready = []
        bounds = self._topics.bounds(self._ids)
        for place, partition in self._ids.items():
            at = self._positions[partition]
            begin, end = bounds[partition]
            if not begin <= at <= end:
                raise OffsetOutOfRange(_out_of_range(partition, at, begin, end))
            if at < end and partition not in self._paused:
                ready.append((place, partition, at, end))
        if len(ready) > max_records:
            self._turn = (self._turn + max_records) % len(ready)
            ready = (ready[self._turn :] + ready[: self._turn])[:max_records]
        return sorted(ready, key=lambda found: found[3] - found[2])

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See `Consumer.commit`."""
        if not positions:
            return
        with self._store.writing() as db:
            self.write_positions(db, positions)

    def write_positions(self, db: sqlite3.Connection, positions: Mapping[Partition, int]) -> None:
        """Commit inside the caller's transaction, under the leases of the group."""
        if self._group is None:
            raise LogError("commit: this consumer has no group; name one to store positions")
        if self._membership is not None:
            self._membership.check(db, [partition for _, partition in positions])
        db.executemany(
            "insert into committed values(?,?,?,?) on conflict(group_name, topic_id, partition) "
            "do update set offset=excluded.offset",
            [
                (self._group, self._topics.get(topic).topic_id, partition, offset)
                for (topic, partition), offset in positions.items()
            ],
        )

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """See `Consumer.committed`."""
        ids = self._topics.ids(partitions)
        stored = {
            (topic_id, partition): offset
            for topic_id, partition, offset in self._store.rows(
                "select topic_id, partition, offset from committed where group_name=?",
                (self._group,),
            )
        }
        return {partition: stored[place] for place, partition in ids.items() if place in stored}

    def close(self) -> None:
        """See `Consumer.close`."""
        if self.is_closed:
            return
        try:
            if self._membership is not None:
                self._give_back(self._membership.lost())
                if self._positions and self._on_revoke is not None:
                    self._on_revoke(self.assignment())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the group without a callback."""
        self.is_closed = True
        if self._membership is not None:
            self._membership.leave()
        self._positions.clear()
        self._ids.clear()

    def _follow_group(self, membership: Membership) -> None:
        change = membership.look()
        while change is not None and any(change):
            self._give_back(change.lost)
            if change.leaving:
                if self._on_revoke is not None:
                    self._on_revoke(self._partitions(change.leaving))
                membership.give_up(change.leaving)
                self._drop(self._partitions(change.leaving))
            if change.is_offered:
                self._begin(membership.take())
            change = membership.look()

    def _give_back(self, shares: list[int]) -> None:
        """Forget shares whose lease was lost; a commit in the callback is fenced."""
        if not shares:
            return
        partitions = self._partitions(shares)
        self._drop(partitions)
        if self._on_revoke is not None:
            self._on_revoke(partitions)

    def _begin(self, shares: list[int]) -> None:
        """Read new shares from the committed positions, or from the first kept record."""
        partitions = self._partitions(shares)
        if not partitions:
            return
        ids = self._topics.ids(partitions)
        bounds = self._topics.bounds(ids)
        stored = self.committed(partitions)
        for partition, (begin, _) in bounds.items():
            self._positions[partition] = stored.get(partition, begin)
        self._ids.update(ids)
        self._read_version = None
        if self._on_assign is not None:
            self._on_assign(partitions)

    def _drop(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            self._positions.pop(partition, None)
            self._paused.discard(partition)
        self._ids = {place: p for place, p in self._ids.items() if p in self._positions}

    def _partitions(self, shares: Iterable[int]) -> list[Partition]:
        wanted = sorted(shares)
        return [Partition(topic, share) for topic in self._subscribed for share in wanted]


def _out_of_range(partition: Partition, at: int, begin: int, end: int) -> str:
    kept = f"the log keeps {begin} to {end - 1}" if begin < end else f"the log ends at {end}"
    where = f"{partition.topic}[{partition.partition}]@{at}: {kept}"
    if at > end:
        return f"{where}. The log was exchanged for an older one: restore it, or use another name."
    return (
        f"{where}; retention deleted what this reader had not read. It cannot go on without it: "
        "begin under another name, from the model of the last checkpoint, with a longer "
        "event_log.retention."
    )
