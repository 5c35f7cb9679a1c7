"""`dead-letters list | show | replay`: what no reader could take, and sending it again."""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from ...schemas import codec, plain
from ...schemas import events as ev
from ...schemas.errors import (
    ConfigError,
    InvalidEvent,
    OffsetOutOfRange,
    StreamrftError,
    UndecodableRecord,
    UnknownTopic,
)
from ...schemas.topics import CATALOGUE
from ..config.read import duration_ms
from ..dead_letters import DeadLetters, Letter, Selection
from .place import Place, catalogue_name, opened

_SHOWN_CHARS, _FIELD_CHARS, _ROW_BYTES = 90, 400, 16
_UNPRINTABLE = re.compile(rb"[^ -~]")


def list_command(args: argparse.Namespace) -> int:
    """`streamrft dead-letters list`."""
    with opened(args.config, args.stage) as place:
        letters = DeadLetters(place.log, place.stage.topics)
        num = 0
        for letter in letters.letters(_selection(place, args)):
            num += 1
            if args.json:
                print(json.dumps(_plain(letter)))
            else:
                print("\n".join(_lines(letter, place)))
    if not args.json:
        print(f"{num} dead letters" if num else "no dead letters")
    return 0


def show_command(args: argparse.Namespace) -> int:
    """`streamrft dead-letters show ID`: everything about one, its bytes and what they say."""
    with opened(args.config, args.stage) as place:
        letters = DeadLetters(place.log, place.stage.topics)
        (letter,) = letters.letters(Selection(frozenset([args.id])))
        try:
            value, gone = letters.value_of(letter), ""
        except (OffsetOutOfRange, UnknownTopic) as error:
            value, gone = None, str(error)
        if args.raw:
            if value is None:
                raise StreamrftError(f"dead letter {args.id}: {gone or 'the record has no value'}")
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
            return 0
        for line in (*_lines(letter, place), *_whole(letter, value, gone, place)):
            print(line)
    return 0


def replay_command(args: argparse.Namespace) -> int:
    """`streamrft dead-letters replay`: 1 when some of the chosen could not be sent again."""
    with opened(args.config, args.stage) as place:
        wanted = _selection(place, args)
        if wanted == Selection() and not args.all:
            raise ConfigError(
                "name IDs, choose by --topic, --reader, --since or --error, or say --all."
            )
        num_sent = num_refused = 0
        letters = DeadLetters(place.log, place.stage.topics)
        for sent in letters.replay(wanted, again=args.again):
            num_refused += bool(sent.refused)
            num_sent += not sent.refused
            if args.json:
                print(json.dumps({"id": sent.letter.id, "refused": sent.refused}))
            else:
                print(f"{sent.letter.id:>6}  {sent.refused or f'to {sent.letter.event.topic}'}")
        left = "" if num_sent or num_refused else "; what was replayed before needs --again"
    print(f"{num_sent} replayed, {num_refused} refused{left}", file=sys.stderr)
    return 1 if num_refused else 0


def _selection(place: Place, args: argparse.Namespace) -> Selection:
    since_ms = None
    if args.since is not None:
        since_ms = ev.now_ms() - duration_ms(args.since, "--since")
    return Selection(
        frozenset(getattr(args, "ids", ())),
        None
        if args.topic is None
        else place.stage.topics.name(catalogue_name(place.stage, args.topic)),
        args.reader,
        since_ms,
        args.error,
    )


def _lines(letter: Letter, place: Place) -> Iterator[str]:
    event = letter.event
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.produced_at / 1000))
    where = f"{place.stage.topics.short(event.topic)}[{event.partition}]@{event.offset}"
    yield f"{letter.id:>6}  {when}  {where}  read by {event.reader}{_history(letter)}"
    yield f"        {' '.join(event.error.split())}"
    if event.value is not None:
        yield f"        {_first(event.value)}"


def _history(letter: Letter) -> str:
    told = f", a replay of {letter.again_from}" if letter.again_from is not None else ""
    if letter.num_replays:
        times = f" {letter.num_replays} times" if letter.num_replays > 1 else ""
        told += f", replayed{times}"
    return told


def _first(value: bytes) -> str:
    """The first bytes as text, what cannot be printed as dots."""
    text = _UNPRINTABLE.sub(b".", value[:_SHOWN_CHARS]).decode()
    return f"{len(value):,} bytes: {text}{'…' if len(value) > len(text) else ''}"


def _whole(letter: Letter, value: bytes | None, gone: str, place: Place) -> Iterator[str]:
    event = letter.event
    yield f"key     {event.key!r}"
    for name, content in event.headers.items():
        yield f"header  {name}: {content!r}"
    if value is None:
        yield f"value   {gone or 'none: the record has a key at most'}"
        return
    yield f"value   {len(value):,} bytes; what they say now:"
    yield from _decoded(value, place.stage.topics.short(event.topic))
    yield from _dump(value)


def _decoded(value: bytes, topic: str) -> Iterator[str]:
    """The event where this version can read it, else the fields before the break."""
    kinds = CATALOGUE[topic].carries if topic in CATALOGUE else ev.EVENTS
    try:
        event = codec.decode(value, *kinds)
    except (UndecodableRecord, InvalidEvent) as error:
        yield f"    no event: {error}"
        for kind in kinds:
            yield from _fields_of(value, kind)
        return
    yield f"    a whole {type(event).__name__}: {json.dumps(plain.to_plain(event))}"


def _fields_of(value: bytes, kind: type[ev.Event]) -> Iterator[str]:
    """As many first fields as can be read."""
    for num in range(len(kind.__struct_fields__), 0, -1):
        if fields := codec.peek(value, kind, num):
            yield f"    {kind.__name__}, readable to its field {num}:"
            for name, content in fields.items():
                text = repr(content)
                end = "…" if len(text) > _FIELD_CHARS else ""
                yield f"        {name}: {text[:_FIELD_CHARS]}{end}"
            return


def _dump(value: bytes) -> Iterator[str]:
    for at in range(0, len(value), _ROW_BYTES):
        row = value[at : at + _ROW_BYTES]
        text = _UNPRINTABLE.sub(b".", row).decode()
        yield f"    {at:08x}  {row.hex(' '):<{3 * _ROW_BYTES}} {text}"


def _plain(letter: Letter) -> dict[str, Any]:
    event = letter.event
    value = event.value
    return {
        "id": letter.id,
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.offset,
        "key": None if event.key is None else event.key.decode(errors="replace"),
        "error": event.error,
        "reader": event.reader,
        "produced_at": event.produced_at,
        "num_replays": letter.num_replays,
        "replay_of": letter.again_from,
        "headers": {k: base64.b64encode(v).decode() for k, v in event.headers.items()},
        "value_base64": None if value is None else base64.b64encode(value).decode(),
    }
