"""Reading topics from where they begin, or from a position, up to the ends that they have now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TypeVar

from ..schemas import codec
from ..schemas.errors import InvalidEvent, LogUnavailable, UndecodableRecord, UnknownTopic
from ..schemas.events import Event
from ..schemas.topics import CATALOGUE, Topics
from .log import Consumer, Log, Partition, Record

E = TypeVar("E", bound=Event)

_POLL_RECORDS, _POLL_MS = 2_000, 200
_STALLED_S = 30.0


def begins(log: Log, *topics: str) -> dict[Partition, int]:
    """First kept offset of every partition of topics by their full names. Raises UnknownTopic."""
    return {
        Partition(name, partition): offset
        for name, found in log.describe(topics).items()
        for partition, offset in found.begin.items()
    }


def committed(log: Log, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """Next offsets that a group stored; without those of partitions where it stored none."""
    with closing(log.consumer(group=group)) as outsider:
        return outsider.committed(partitions)


def drain(
    log: Log, consumer: Consumer, partitions: Iterable[Partition] | None = None
) -> Iterator[Record]:
    """What an assigned consumer reads until it is past the ends that its partitions have now.

    Args:
        log: of the consumer.
        consumer: stands behind the last record yielded; the owner goes on with it, or closes it.
        partitions: whose ends count; all of its own unless given.

    Raises:
        LogUnavailable: nothing came for 30 s although an end was not reached.
    """
    wanted = list(consumer.assignment() if partitions is None else partitions)
    ends = log.end_offsets(wanted)
    moved_at = time.monotonic()
    while left := _not_reached(consumer.positions(), ends):
        records = consumer.poll(_POLL_RECORDS, _POLL_MS)
        yield from records
        if records:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > _STALLED_S:
            place, at, end = left
            raise LogUnavailable(
                f"{place.topic}[{place.partition}]: stands at {at} for {_STALLED_S:g} s, its end "
                f"{end} is out of reach"
            )


def read_to_end(log: Log, starts: Mapping[Partition, int]) -> Iterator[Record]:
    """Records of partitions from these offsets to their present ends. Raises as `drain`."""
    with closing(log.consumer()) as consumer:
        consumer.assign(starts)
        yield from drain(log, consumer)


def read_events(log: Log, topics: Topics, topic: str) -> Iterator[Event]:
    """Every event that a topic of the catalogue holds now, in order within a partition.

    None while the topic is missing. Records that are no events are left out: their own readers
    dead-letter them. Raises as `drain`.
    """
    try:
        starts = begins(log, topics.name(topic))
    except UnknownTopic:
        return
    for record in read_to_end(log, starts):
        event = event_in(record, *CATALOGUE[topic].carries)
        if event is not None:
            yield event


def event_in(record: Record, *kinds: type[E]) -> E | None:
    """The event of one of these kinds, or None where the record is none."""
    try:
        return codec.decode(record.value, *kinds)
    except (UndecodableRecord, InvalidEvent):
        return None


def _not_reached(
    positions: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> tuple[Partition, int, int] | None:
    """The first partition that stands before its end, where it stands, and the end."""
    return next(((p, positions[p], end) for p, end in ends.items() if positions[p] < end), None)
