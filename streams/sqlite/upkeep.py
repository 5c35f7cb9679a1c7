"""What retention and compaction let go of, deleted now and then by those who append."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping

from ...schemas.errors import LogUnavailable
from ...schemas.events import now_ms
from .store import Store
from .topics import Topic

DEFAULT_TOMBSTONE_MS = 24 * 3_600_000
_BATCH = 1_000  # records of one partition in one transaction: about 10 ms of the write lock
_LONGEST_INTERVAL_MS = 60_000
_PATIENCE_MS = 100


class Upkeep:
    """Bounded work after an append: at most one batch a partition, in its own transaction.

    A compacted topic keeps the last value of each key. `latest` says where that lies for all
    records below `compacted_to`, so a batch costs what is new, not what is kept.
    """

    def __init__(self, store: Store, tombstone_ms: int = DEFAULT_TOMBSTONE_MS) -> None:
        self._store, self._tombstone_ms = store, tombstone_ms
        self._num_appended: dict[int, int] = {}
        self._expires_at: dict[int, float] = {}

    def after_append(self, counts: Mapping[Topic, int]) -> None:
        """Called after every commit with the number of records appended to each topic."""
        for topic, num_records in counts.items():
            try:
                if topic.spec.cleanup == "compact":
                    self._compact_if_due(topic, num_records)
                elif topic.spec.retention_ms is not None:
                    self._expire_if_due(topic, topic.spec.retention_ms)
            except LogUnavailable:
                # the append is durable already, and the next one tries this again
                return

    def _expire_if_due(self, topic: Topic, retention_ms: int) -> None:
        now_s = time.monotonic()
        if now_s < self._expires_at.get(topic.topic_id, 0.0):
            return
        if not self._expire(topic.topic_id, now_ms() - retention_ms):
            interval_ms = min(_LONGEST_INTERVAL_MS, retention_ms // 10)
            self._expires_at[topic.topic_id] = now_s + interval_ms / 1000

    def _expire(self, topic_id: int, oldest_ms: int) -> bool:
        """Delete records before the first that is young enough; whether some are left."""
        is_more = False
        for partition, first, end in self._store.rows(
            "select partition, first_offset, next_offset from partitions where topic_id=?",
            (topic_id,),
        ):
            stop = min(end, first + _BATCH)
            young = self._store.rows(
                "select offset from records where topic_id=? and partition=? and offset>=? "
                "and offset<? and timestamp_ms>=? order by offset limit 1",
                (topic_id, partition, first, stop, oldest_ms),
            )
            kept = young[0][0] if young else stop
            is_more |= not young and stop < end
            if kept > first:
                self._delete_before(topic_id, partition, kept)
        return is_more

    def _delete_before(self, topic_id: int, partition: int, offset: int) -> None:
        with self._store.writing(_PATIENCE_MS) as db:
            db.execute(
                "delete from records where topic_id=? and partition=? and offset<?",
                (topic_id, partition, offset),
            )
            db.execute(
                "update partitions set first_offset=max(first_offset, ?) "
                "where topic_id=? and partition=?",
                (offset, topic_id, partition),
            )

    def _compact_if_due(self, topic: Topic, num_records: int) -> None:
        topic_id = topic.topic_id
        # a process begins as if due: the one before it may have ended between two batches
        appended = self._num_appended.get(topic_id, _BATCH) + num_records
        self._num_appended[topic_id] = appended
        if appended < _BATCH:
            return
        dirty = self._store.rows(
            "select partition, next_offset - compacted_to from partitions "
            "where topic_id=? and next_offset - compacted_to >= ?",
            (topic_id, _BATCH),
        )
        for partition, _ in dirty:
            with self._store.writing(_PATIENCE_MS) as db:
                self._compact_batch(db, (topic_id, partition))
        if not any(num_dirty >= 2 * _BATCH for _, num_dirty in dirty):
            self._num_appended[topic_id] = 0
        self._drop_tombstones(topic_id)

    def _compact_batch(self, db: sqlite3.Connection, place: tuple[int, int]) -> None:
        (start,) = db.execute(
            "select compacted_to from partitions where topic_id=? and partition=?", place
        ).fetchone() or (0,)
        rows = db.execute(
            "select offset, key, value is null from records where topic_id=? and partition=? "
            "and offset>=? and offset<? order by offset",
            (*place, start, start + _BATCH),
        ).fetchall()
        last = {key: (offset, is_tombstone) for offset, key, is_tombstone in rows}
        db.executemany(
            "delete from records where topic_id=? and partition=? and offset="
            "(select offset from latest where topic_id=? and partition=? and key=?)",
            [(*place, *place, key) for key in last],
        )
        db.executemany(
            "delete from records where topic_id=? and partition=? and offset=?",
            [(*place, offset) for offset, key, _ in rows if last[key][0] != offset],
        )
        now = now_ms()
        db.executemany(
            "insert or replace into latest values(?,?,?,?,?)",
            [
                (*place, key, offset, now if is_tombstone else None)
                for key, (offset, is_tombstone) in last.items()
            ],
        )
        db.execute(
            "update partitions set compacted_to=min(next_offset, max(compacted_to, ?)) "
            "where topic_id=? and partition=?",
            (start + _BATCH, *place),
        )

    def _drop_tombstones(self, topic_id: int) -> None:
        old = self._store.rows(
            "select topic_id, partition, key, offset from latest "
            "where topic_id=? and tombstone_ms<=? limit ?",
            (topic_id, now_ms() - self._tombstone_ms, _BATCH),
        )
        if not old:
            return
        with self._store.writing(_PATIENCE_MS) as db:
            db.executemany(
                "delete from latest where topic_id=? and partition=? and key=? and offset=?", old
            )
            db.executemany(
                "delete from records where topic_id=? and partition=? and offset=?",
                [(topic_id, partition, offset) for topic_id, partition, _, offset in old],
            )
