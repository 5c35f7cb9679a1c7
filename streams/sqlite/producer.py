"""Appending to the embedded log: a flush or a transaction is one transaction of the file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ...schemas.errors import EventTooLarge, LogError, LogUnavailable, UnknownTopic
from ...schemas.events import now_ms
from ...schemas.topics import partition_for
from ..log import Consumer, Lease, Partition, Position
from .consumer import SqliteConsumer
from .roles import Roles
from .store import Store
from .topics import Topic, TopicTable
from .upkeep import Upkeep

_encode_headers = msgspec.msgpack.Encoder().encode

_INSERT = (
    "insert into records(topic_id, partition, offset, timestamp_ms, key, value, headers) "
    "values(?,?,?,?,?,?,?)"
)


class SqliteProducer:
    """See `Producer`. Nothing is written before `flush` or the end of a transaction."""

    def __init__(
        self,
        store: Store,
        topics: TopicTable,
        roles: Roles,
        upkeep: Upkeep,
        fence: Lease | None,
        max_event_bytes: int,
    ) -> None:
        self._store, self._topics, self._roles = store, topics, roles
        self._upkeep, self._fence = upkeep, fence
        self._max_event_bytes = max_event_bytes
        self._pending: list[tuple] = []
        self._commits: list[tuple[SqliteConsumer, dict[Partition, int]]] = []
        self._in_transaction = False
        self._turn = 0

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """See `Producer.send`."""
        found = self._topics.get(topic)
        if value is not None:
            limit = min(found.spec.max_event_bytes, self._max_event_bytes)
            if len(value) > limit:
                raise EventTooLarge(f"{topic} key={key!r}", len(value), limit)
        if partition is None:
            partition = self._place(key, found.spec.num_partitions)
        elif not 0 <= partition < found.spec.num_partitions:
            raise UnknownTopic(
                f"{topic}[{partition}]: has partitions 0..{found.spec.num_partitions - 1}"
            )
        if key is None and found.spec.cleanup == "compact":
            raise LogError(f"{topic}: keeps the last value of each key; send a key")
        packed = _encode_headers(tuple(headers)) if headers else None
        stamp = now_ms() if timestamp_ms is None else timestamp_ms
        self._pending.append((found, partition, stamp, key, value, packed))

    def _place(self, key: bytes | None, num_partitions: int) -> int:
        if key is not None:
            return partition_for(key, num_partitions)
        self._turn += 1
        return self._turn % num_partitions

    def flush(self, timeout_ms: int = 30_000) -> list[Position]:
        """See `Producer.flush`. After LogUnavailable, and only then, flush again."""
        if self._in_transaction:
            raise LogError("flush inside a transaction: its end makes the records durable")
        try:
            positions = self._write(timeout_ms)
        except LogUnavailable:
            raise
        except LogError:
            self._pending.clear()
            raise
        self._pending.clear()
        return positions

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """See `Producer.transaction`. The file is locked at its end only, not while it is open."""
        if self._in_transaction:
            raise LogError("a transaction inside a transaction")
        if self._pending:
            raise LogError(
                f"{len(self._pending)} records were sent before the transaction: flush them first"
            )
        self._in_transaction = True
        try:
            yield
            self._write(None)
        finally:
            self._in_transaction = False
            self._pending.clear()
            self._commits.clear()

    def send_positions(self, consumer: Consumer, positions: Mapping[Partition, int]) -> None:
        """See `Producer.send_positions`. The lease is checked when the transaction ends."""
        if not self._in_transaction:
            raise LogError("send_positions outside a transaction: use consumer.commit")
        if not isinstance(consumer, SqliteConsumer) or not consumer.is_on(self._store):
            raise LogError("send_positions: producer and consumer must come from the same Log")
        self._commits.append((consumer, dict(positions)))

    def close(self) -> None:
        """See `Producer.close`."""
        self._pending.clear()

    def _write(self, timeout_ms: int | None) -> list[Position]:
        if not self._pending and not self._commits:
            if self._fence is not None:
                with self._store.reading() as db:
                    self._roles.check(db, self._fence)
            return []
        with self._store.writing(timeout_ms) as db:
            if self._fence is not None:
                self._roles.check(db, self._fence)
            for consumer, positions in self._commits:
                consumer.write_positions(db, positions)
            positions = self._append(db)
        kept = Counter(topic for topic, *_ in self._pending if topic.is_kept_up)
        if kept:
            self._upkeep.after_append(kept)
        return positions

    def _append(self, db: sqlite3.Connection) -> list[Position]:
        ends: dict[tuple[int, int], int] = {}
        rows: list[tuple] = []
        positions: list[Position] = []
        for topic, partition, stamp, key, value, packed in self._pending:
            place = topic.topic_id, partition
            offset = ends.get(place)
            if offset is None:
                offset = self._end(db, topic, partition)
            ends[place] = offset + 1
            rows.append((topic.topic_id, partition, offset, stamp, key, value, packed))
            positions.append(Position(topic.spec.name, partition, offset))
        db.executemany(_INSERT, rows)
        db.executemany(
            "update partitions set next_offset=? where topic_id=? and partition=?",
            [(end, *place) for place, end in ends.items()],
        )
        return positions

    def _end(self, db: sqlite3.Connection, topic: Topic, partition: int) -> int:
        row = db.execute(
            "select next_offset from partitions where topic_id=? and partition=?",
            (topic.topic_id, partition),
        ).fetchone()
        if row is None:
            self._topics.forget(topic.spec.name)
            raise UnknownTopic(f"{topic.spec.name}: was removed since the record was sent")
        return row[0]
