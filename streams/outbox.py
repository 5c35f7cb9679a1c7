"""What one batch of a join worker writes, gathered before its transaction, and the state it reads.

Layout of the compacted topic `join_state`, one record a key, partition by partition:

- key = group_id, value = msgpack of `join_state.Group`; a tombstone when the group is forgotten;
- key = `__counters__`, value = msgpack {name: int}: every count of `RewardJoin.counts` (rewards
  read and what became of them, trajectories read, repeats, groups closed, amended), dead_letters,
  experiences and drops written, and the sizes of the open state: open_groups, pending
  (trajectories without a final state), early (rewards without a final count), remembered, and
  time_ms, the stream time. Sums over the partitions are the run's. `next.<topic>` is the next
  offset of that topic which the state does not hold: positions are a part of the state, so they
  are never ahead of it nor behind, whichever shell wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from ..schemas import codec
from ..schemas.errors import OffsetOutOfRange
from ..schemas.events import Event
from ..schemas.topics import Topics, key_of
from .log import Log, Partition, Producer, Record
from .reading import begins, read_to_end

COUNTERS_KEY = b"__counters__"
_NEXT = "next."

Headers = Iterable[tuple[str, bytes]]


class Outgoing(NamedTuple):
    """One record to be sent; `topic` by its catalogue name."""

    topic: str
    key: bytes
    value: bytes | None
    partition: int | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None


class Outbox:
    """Records of one partition's batch, in order. Nothing is sent before `send_all`."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.records: list[Outgoing] = []

    def event(self, topic: str, event: Event, *, partition: int | None = None) -> None:
        """Add an event under its own key."""
        self.records.append(Outgoing(topic, key_of(event, topic), codec.encode(event), partition))

    def add(self, outgoing: Outgoing) -> None:
        """Add a record."""
        self.records.append(outgoing)

    def send_all(self, producer: Producer) -> None:
        """Hand every record to the producer."""
        names = {topic: self._topics.name(topic) for topic in {r.topic for r in self.records}}
        for topic, key, value, partition, headers, timestamp_ms in self.records:
            producer.send(
                names[topic],
                value,
                key=key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
            )


class JoinState(NamedTuple):
    """What the log holds of one partition of the join.

    `groups`: encoded `join_state.Group`s; `positions`: next offsets by topic, none before the
    first batch.
    """

    groups: list[bytes]
    counters: dict[str, int]
    positions: dict[str, int]


def encode_counters(counters: Mapping[str, int], positions: Mapping[str, int]) -> bytes:
    """The value under COUNTERS_KEY."""
    return msgspec.msgpack.encode(
        {**counters, **{_NEXT + topic: offset for topic, offset in positions.items()}}
    )


def read_state(
    log: Log,
    topics: Topics,
    partition: int,
    *,
    through: Callable[[Iterator[Record]], Iterable[Record]] = iter,
) -> JoinState:
    """The last state of every group of one partition, its counters and positions.

    `through` passes the records on; what else it does has time while many are read.

    Raises:
        LogUnavailable: the end could not be reached; try again.
    """
    latest = _read_latest(log, Partition(topics.name("join_state"), partition), through)
    value = latest.pop(COUNTERS_KEY, None) or b"\x80"
    found = msgspec.msgpack.decode(value, type=dict[str, int])
    positions = {n.removeprefix(_NEXT): found.pop(n) for n in list(found) if n.startswith(_NEXT)}
    return JoinState(list(latest.values()), found, positions)


def read_counters(log: Log, topics: Topics) -> dict[str, int]:
    """The run's counters: the sum over all partitions (time_ms: the oldest)."""
    total: dict[str, int] = {}
    for partition in range(topics.partitions("join_state")):
        for name, value in read_state(log, topics, partition).counters.items():
            if name == "time_ms":
                total[name] = min(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def _read_latest(
    log: Log, source: Partition, through: Callable[[Iterator[Record]], Iterable[Record]]
) -> dict[bytes, bytes]:
    """The last value of every key that has one."""
    latest: dict[bytes, bytes] = {}
    while True:
        starts = {source: begins(log, source.topic)[source]}
        try:
            for record in through(read_to_end(log, starts)):
                assert record.key is not None, "join_state records have keys"
                latest.pop(record.key, None)
                if record.value is not None:
                    latest[record.key] = record.value
            return latest
        except OffsetOutOfRange:  # compaction moved the first kept record before it was read
            latest.clear()
