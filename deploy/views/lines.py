"""`tail` and `produce`: a topic as lines, for people and for pipes."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...schemas import codec, plain
from ...schemas import events as ev
from ...schemas.errors import (
    ConfigError,
    EventTooLarge,
    InvalidEvent,
    StreamrftError,
    UndecodableRecord,
)
from ...schemas.topics import CATALOGUE, key_of
from ...streams.log import Consumer, Partition, Record
from ...streams.reading import drain
from .place import Place, catalogue_name, opened
from .sentences import sentence

_POLL_MS = 200
_LAST, _FURTHER = 10, 4
_CHUNK_BYTES = 1 << 16


def tail_command(args: argparse.Namespace) -> int:
    """`streamrft tail TOPIC`."""
    with opened(args.config, args.stage) as place:
        topic = catalogue_name(place.stage, args.topic)
        limit = _LAST if args.n is None and args.start is None else args.n
        consumer = place.log.consumer()
        records = _last(place, consumer, topic, args.start, limit)
        _print(records, topic, args.json)
        if not records and not args.json:
            print(f"{place.stage.topics.name(topic)}: no events yet", file=sys.stderr)
        while args.follow:
            _print(consumer.poll(500, _POLL_MS), topic, args.json)
    return 0


def produce_command(args: argparse.Namespace) -> int:
    """`streamrft produce TOPIC`: a bad line is named and makes the exit code 1; others go on."""
    with opened(args.config, args.stage) as place:
        topic = catalogue_name(place.stage, args.topic)
        if not CATALOGUE[topic].carries:
            raise ConfigError(f"topic {topic}: it is the join's own and takes no events.")
        num_sent, num_bad = _produce(place, topic, args.file)
    told = f"{num_sent} events produced to {place.stage.topics.name(topic)}"
    print(told + (f", {num_bad} lines refused" if num_bad else ""), file=sys.stderr)
    return 1 if num_bad else 0


def event_of(line: str, topic: str) -> ev.Event:
    """A JSON line -> event: the event itself, or what `tail --json` prints around it.

    Raises:
        InvalidEvent: no JSON object, or no event that the topic carries.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidEvent(f"a JSON object is expected, {type(found).__name__} found")
    kinds = {kind.__name__: kind for kind in CATALOGUE[topic].carries}
    if isinstance(found.get("event"), dict):
        name = found.get("type")
        if name not in kinds:
            raise InvalidEvent(f"type {name!r}: topic {topic} carries {' and '.join(kinds)}")
        return plain.from_plain(kinds[name], found["event"])
    return plain.from_plain(_kind_of(found, list(kinds.values())), found)


def _kind_of(found: dict[str, Any], kinds: list[type[ev.Event]]) -> type[ev.Event]:
    """Of several types the one that shares the most fields with the object."""
    return max(kinds, key=lambda kind: len(set(kind.__struct_fields__) & set(found)))


def _last(
    place: Place, consumer: Consumer, topic: str, start: int | None, limit: int | None
) -> list[Record]:
    """Records up to the present end, oldest first; `consumer` then stands at that end."""
    name = place.stage.topics.name(topic)
    info = place.log.describe([name])[name]
    back = limit
    while True:
        begin = {p: _begin(first, info.end[p], start, back) for p, first in info.begin.items()}
        consumer.assign({Partition(name, p): offset for p, offset in begin.items()})
        records = list(drain(place.log, consumer))
        if not back or start is not None or _is_enough(records, begin, info.begin, limit or 0):
            break
        back *= _FURTHER
    records.sort(key=lambda r: (r.timestamp_ms, r.partition, r.offset))
    return records if limit is None else records[len(records) - min(limit, len(records)) :]


def _is_enough(
    records: Sequence[Record], begin: Mapping[int, int], firsts: Mapping[int, int], limit: int
) -> bool:
    """Whether each partition gave what was asked; offsets of markers and gaps are no records."""
    found = Counter(r.partition for r in records)
    return all(at == firsts[p] or found[p] >= limit for p, at in begin.items())


def _begin(first: int, end: int, start: int | None, limit: int | None) -> int:
    """Where to read a partition from: `start`, or far enough back for the last `limit`."""
    if start is not None:
        return min(max(first, start), end)
    return first if limit is None else max(first, end - limit)


def _print(records: Iterable[Record], topic: str, as_json: bool) -> None:
    for record in records:
        print(_json_line(record, topic) if as_json else _text_line(record, topic))
    sys.stdout.flush()


def _decoded(record: Record, topic: str) -> ev.Event | str:
    """The event, or why there is none."""
    if record.value is None:
        return "deleted (no value)"
    if not CATALOGUE[topic].carries:
        return f"{len(record.value)} bytes of the join's state"
    try:
        return codec.decode(record.value, *CATALOGUE[topic].carries)
    except (UndecodableRecord, InvalidEvent) as error:
        return f"no event: {error}"


def _text_line(record: Record, topic: str) -> str:
    seconds = time.strftime("%m-%d %H:%M:%S", time.localtime(record.timestamp_ms / 1000))
    found = _decoded(record, topic)
    text = found if isinstance(found, str) else sentence(found)
    return f"{seconds} {topic}[{record.partition}]@{record.offset}  {text}"


def _json_line(record: Record, topic: str) -> str:
    key = record.key.decode(errors="replace") if record.key is not None else None
    line: dict[str, Any] = {
        "topic": topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": key,
    }
    found = _decoded(record, topic)
    if isinstance(found, str):
        line |= {"error": found, "value_base64": base64.b64encode(record.value or b"").decode()}
    else:
        line |= {"type": type(found).__name__, "event": plain.to_plain(found)}
    return json.dumps(line, ensure_ascii=False)


def _produce(place: Place, topic: str, file: str) -> tuple[int, int]:
    name, limit = place.stage.topics.name(topic), place.run.config.event_log.max_event_bytes
    producer = place.log.producer()
    num_sent = num_bad = 0
    for number, line in _numbered_lines(file):
        if line is None:
            producer.flush()
            continue
        try:
            event = event_of(line.decode(), topic)
            value = codec.encode(event, max_bytes=limit)
        except (InvalidEvent, EventTooLarge, UnicodeDecodeError) as error:
            print(f"line {number}: {error}", file=sys.stderr)
            num_bad += 1
            continue
        producer.send(name, value, key=key_of(event, topic), partition=_partition(event))
        num_sent += 1
    producer.flush()
    return num_sent, num_bad


def _partition(event: ev.Event) -> int | None:
    """Partition of what the catalogue does not place by its key."""
    if isinstance(event, ev.Ended):
        return 0
    return event.partition if isinstance(event, ev.Clock) else None


def _numbered_lines(file: str) -> Iterator[tuple[int, bytes | None]]:
    """Lines from 1, blank ones left out; (n, None) whenever nothing more is there at once."""
    fd = 0 if file == "-" else _open(file)
    number = 0
    parts: list[bytes] = []  # of the line that has not ended; one join a line, however long
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            first, *others = chunk.split(b"\n")
            parts.append(first)
            for other in others:
                number += 1
                if text := b"".join(parts).strip():
                    yield number, text
                parts = [other]
            yield number, None
        if text := b"".join(parts).strip():
            yield number + 1, text
    finally:
        if file != "-":
            os.close(fd)


def _open(file: str) -> int:
    try:
        fd = os.open(file, os.O_RDONLY)
        os.read(fd, 0)  # a folder opens, and cannot be read
        return fd
    except OSError as error:
        raise StreamrftError(f"--file {file}: {error.strerror}") from error
