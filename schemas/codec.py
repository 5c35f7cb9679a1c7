"""Events to record values and back: Avro single-object encoding, or JSON for rewards.

A value is the marker C3 01, the CRC-64-AVRO fingerprint of the writer's schema (8 bytes,
little-endian) and the Avro body. Fingerprints of older schemas are kept in `history/`, so any
record ever written stays readable without a registry.
Source: Apache Avro 1.12 specification, "Single-object encoding" and "Schema Fingerprints".
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import fastavro
import msgspec
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from . import events as ev
from .errors import EventTooLarge, InvalidEvent, UndecodableRecord
from .validate import check

MARKER = b"\xc3\x01"
_HEADER_BYTES = 10
_HERE = Path(__file__).parent
E = TypeVar("E", bound=ev.Event)


def encode(event: ev.Event, *, max_bytes: int | None = None) -> bytes:
    """Event -> record value.

    Raises:
        InvalidEvent: the event breaks its contract.
        EventTooLarge: the value is over `max_bytes`.
    """
    header, schema, to_record = _writer(type(event))
    out = io.BytesIO()
    out.write(header)
    try:
        record = to_record(event)
        msgspec.convert(record, type(event))  # types and ranges, which fastavro lets through
        check(event)
        fastavro.schemaless_writer(out, schema, record)  # pyright: ignore[reportUnknownMemberType]
    except InvalidEvent:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidEvent(f"{type(event).__name__}: {error}") from error
    value = out.getvalue()
    if max_bytes is not None and len(value) > max_bytes:
        raise EventTooLarge(type(event).__name__, len(value), max_bytes)
    return value


def encode_siblings(experiences: Sequence[ev.Experience]) -> list[bytes]:
    """Values of experiences of one close, which all carry the same group: it is encoded once.

    As `encode`, but the types of the fields are the caller's word.

    Raises:
        InvalidEvent: one breaks its contract.
    """
    header, before, shared, after = _experience_parts()
    values: list[bytes] = []
    group = b""
    for e in experiences:
        check(e)
        record = msgspec.structs.asdict(e)
        if not values:
            group = _body(shared, {"group": [msgspec.structs.asdict(m) for m in e.group]})
        values.append(b"".join((header, _body(before, record), group, _body(after, record))))
    return values


def decode(value: bytes | None, *expected: type[E]) -> E:
    """Record value -> event of one of the `expected` types.

    Raises:
        UndecodableRecord: unknown fingerprint, truncated or trailing bytes, wrong type, bad JSON.
        InvalidEvent: the record decodes but breaks its contract.
    """
    if value is None:
        raise UndecodableRecord("the record has no value")
    if value[:1] == b"{" and ev.Reward in expected:
        event: ev.Event = _decode_json_reward(value)
    else:
        event = _decode_avro(value)
    if not isinstance(event, expected):
        names = " or ".join(e.__name__ for e in expected)
        raise UndecodableRecord(f"{type(event).__name__} found, {names} expected")
    check(event)
    return event


def peek(value: bytes, cls: type[ev.Event], num_fields: int) -> dict[str, Any]:
    """The first fields of an Avro record of `cls` that may be broken further on; {} if unreadable.

    Nothing is checked but the Avro types: for naming a record that was refused.
    """
    found = _schemas().get(value[2:_HEADER_BYTES]) if value[:2] == MARKER else None
    if found is None or found[0] is not cls:
        return {}
    head = {**found[1], "fields": found[1]["fields"][:num_fields]}
    try:
        return cast(
            dict[str, Any],
            fastavro.schemaless_reader(  # pyright: ignore[reportUnknownMemberType]
                io.BytesIO(value[_HEADER_BYTES:]), head, None
            ),
        )
    except Exception:  # fastavro's Cython readers raise many kinds on a cut or bad body
        return {}


def _decode_avro(value: bytes) -> ev.Event:
    if len(value) < _HEADER_BYTES or value[:2] != MARKER:
        raise UndecodableRecord(
            f"{len(value)} bytes beginning {value[:2].hex() or 'with nothing'}: no Avro "
            "single-object record (marker c301). Encode with schemas.codec or any Avro library."
        )
    found = _schemas().get(value[2:_HEADER_BYTES])
    if found is None:
        raise UndecodableRecord(
            f"unknown schema fingerprint {value[2:_HEADER_BYTES].hex()}. Its writer is newer than "
            "this reader: upgrade this process, then replay the dead letter."
        )
    cls, writer, reader = found
    body = io.BytesIO(value)
    body.seek(_HEADER_BYTES)
    try:
        record = fastavro.schemaless_reader(  # pyright: ignore[reportUnknownMemberType]
            body, writer, reader
        )
    except Exception as error:  # fastavro's Cython readers raise many kinds on a cut or bad body
        raise UndecodableRecord(
            f"{cls.__name__}: {len(value):,} bytes are truncated or corrupt "
            f"({error or type(error).__name__})"
        ) from error
    if body.tell() != len(value):
        raise UndecodableRecord(f"{cls.__name__}: {len(value) - body.tell()} bytes after its end")
    try:
        return msgspec.convert(record, cls)
    except msgspec.ValidationError as error:
        raise UndecodableRecord(f"{cls.__name__}: {error}") from error


def _decode_json_reward(value: bytes) -> ev.Reward:
    try:
        return msgspec.json.decode(value, type=ev.Reward)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableRecord(
            f"JSON reward: {error}. The contract is schemas/reward.schema.json."
        ) from error


def reward_json_schema() -> dict[str, Any]:
    """JSON Schema of a reward on the wire, as published in `reward.schema.json`."""
    schema = msgspec.json.schema(ev.Reward)
    others: dict[str, Any] = schema["$defs"]
    reward = others.pop(ev.Reward.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | reward | {"$defs": others}


def schema_of(cls: type[ev.Event]) -> dict[str, Any]:
    """The current Avro schema of an event type, as parsed from its `.avsc` file."""
    return json.loads((_HERE / f"{cls.__name__}.avsc").read_text())


def fingerprint_of(schema: dict[str, Any]) -> bytes:
    """CRC-64-AVRO of the schema's parsing canonical form, 8 bytes little-endian."""
    digest = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return bytes.fromhex(digest)


@cache
def _writer(cls: type[ev.Event]) -> tuple[bytes, Any, Callable[[ev.Event], dict[str, Any]]]:
    schema = schema_of(cls)
    return MARKER + fingerprint_of(schema), parse_schema(schema), _to_record(cls)


@cache
def _experience_parts() -> tuple[bytes, Any, Any, Any]:
    """Header, and the schemas of the fields before the group, of the group, and after it.

    The Avro body of a record is the bodies of its fields, one behind the other.
    """
    header, _, _ = _writer(ev.Experience)
    schema = schema_of(ev.Experience)
    fields = schema["fields"]
    at = [field["name"] for field in fields].index("group")
    parts = (fields[:at], fields[at : at + 1], fields[at + 1 :])
    before, shared, after = (parse_schema({**schema, "fields": part}) for part in parts)
    return header, before, shared, after


def _body(schema: Any, record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, record)  # pyright: ignore[reportUnknownMemberType]
    return out.getvalue()


@cache
def _schemas() -> dict[bytes, tuple[type[ev.Event], Any, Any]]:
    """Fingerprint -> (event type, writer's schema, reader's schema or None when they are equal)."""
    found: dict[bytes, tuple[type[ev.Event], Any, Any]] = {}
    by_name = {cls.__name__: cls for cls in ev.EVENTS}
    for entry in (_HERE / "history").glob("*.avsc"):
        old = json.loads(entry.read_text())
        cls = by_name[old["name"]]
        found[fingerprint_of(old)] = (cls, parse_schema(old), parse_schema(schema_of(cls)))
    for cls in ev.EVENTS:
        schema = schema_of(cls)
        found[fingerprint_of(schema)] = (cls, parse_schema(schema), None)
    return found


_NESTED: dict[type[ev.Event], dict[str, type[ev.Event]]] = {
    ev.Trajectory: {"sequences": ev.Sequence, "scores": ev.Score, "claim": ev.Claim},
    ev.Sequence: {"turns": ev.Turn},
    ev.Score: {"span": ev.Span},
    ev.Reward: {"span": ev.Span},
    ev.Experience: {"group": ev.GroupMember},
    ev.Cut: {"members": ev.CutMember},
}


@cache
def _to_record(cls: type[ev.Event]) -> Callable[[ev.Event], dict[str, Any]]:
    nested = [(field, _to_record(inner)) for field, inner in _NESTED.get(cls, {}).items()]
    if not nested:
        return msgspec.structs.asdict

    def convert(event: ev.Event) -> dict[str, Any]:
        record = msgspec.structs.asdict(event)
        for field, inner in nested:
            value = record[field]
            if isinstance(value, list):
                record[field] = [inner(v) for v in cast(list[ev.Event], value)]
            elif value is not None:
                record[field] = inner(value)
        return record

    return convert
