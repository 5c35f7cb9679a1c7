"""Records of the embedded log as they are read from its file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import groupby

import msgspec

from ...schemas.errors import OffsetOutOfRange
from ..log import Position, Record
from .store import Store
from .topics import TopicTable

_decode_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...]).decode

_new = tuple.__new__

_COLUMNS = "offset, timestamp_ms, key, value, headers"
_RUN = (
    f"select {_COLUMNS} from records where topic_id=? and partition=? and offset>=? "
    "order by offset limit ?"
)
_EXACT = (
    f"select {_COLUMNS} from records where topic_id=? and partition=? "
    "and offset in (select value from json_each(?))"
)


def read_run(
    db: sqlite3.Connection,
    place: tuple[int, int],
    topic: str,
    offset: int,
    max_records: int,
    max_bytes: int,
) -> tuple[list[Record], int]:
    """Records of (topic_id, partition) from `offset` on, and their size in bytes.

    At least one record comes when there is one, whatever `max_bytes`.
    """
    partition = place[1]
    records: list[Record] = []
    num_bytes = 0
    for at, stamp, key, value, packed in db.execute(_RUN, (*place, offset, max_records)):
        headers = _decode_headers(packed) if packed else ()
        # Record(...) itself costs twice as much as reading the row
        records.append(_new(Record, (topic, partition, at, stamp, key, value, headers)))
        if value:
            num_bytes += len(value)
            if num_bytes >= max_bytes:
                break
    return records, num_bytes


def read_exact(store: Store, topics: TopicTable, positions: Sequence[Position]) -> list[Record]:
    """See `Log.read_at`."""
    found: dict[Position, Record] = {}
    for (topic, partition), run in groupby(sorted(set(positions)), key=lambda at: at[:2]):
        wanted = ",".join(str(at.offset) for at in run)
        place = topics.get(topic).topic_id, partition
        for at, stamp, key, value, packed in store.rows(_EXACT, (*place, f"[{wanted}]")):
            headers = _decode_headers(packed) if packed else ()
            record = Record(topic, partition, at, stamp, key, value, headers)
            found[Position(topic, partition, at)] = record
    for at in positions:
        if at not in found:
            raise OffsetOutOfRange(
                f"{at.topic}[{at.partition}]@{at.offset}: is not on the log: deleted by retention "
                "or compaction, or past the end"
            )
    return [found[at] for at in positions]
