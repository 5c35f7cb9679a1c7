"""The `.avsc` files, the typed events and the history of schemas say the same thing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import fastavro
import msgspec
import pytest

from streamrft.schemas import codec, events

HISTORY = sorted((Path(codec.__file__).parent / "history").glob("*.avsc"))
NAMES = [cls.__name__ for cls in events.EVENTS]


def minimal(schema: Any) -> Any:
    """Smallest value that an Avro schema allows, with ids where an event's rules want ids."""
    if isinstance(schema, list):
        return minimal(schema[0])
    if isinstance(schema, dict):
        if schema["type"] == "record":
            return {f["name"]: minimal(f["type"]) for f in schema["fields"]}
        return {"array": [], "map": {}}[schema["type"]]
    return {
        "string": "g.1",
        "int": 1,
        "long": 1,
        "double": 1.0,
        "bytes": b"",
        "boolean": False,
        "null": None,
    }[schema]


HONEST = {
    "Trajectory": {
        "trajectory_id": "g.1:0:a",
        "group_id": "g.1",
        "slot": 0,
        "attempt": "a",
        "finish_reason": "failed",
        "failure": "no engine",
    },
    "Reward": {"trajectory_id": "g.1:0:a"},
    "Checkpoint": {"kind": "full"},
    "SaveFailed": {"kind": "full"},
    "Heartbeat": {"state": "alive"},
    "Drop": {"reason": "stale"},
}


def record_of(schema: dict[str, Any]) -> dict[str, Any]:
    fields = {f["name"] for f in schema["fields"]}
    honest = HONEST.get(schema["name"], {})
    return minimal(schema) | {k: v for k, v in honest.items() if k in fields}


def avro_type(hint: Any) -> Any:
    if hint is events.Int or hint is events.Long:
        return "int" if hint is events.Int else "long"
    origin, args = get_origin(hint), get_args(hint)
    if hasattr(hint, "__metadata__"):
        return "bytes"
    if origin is Literal:
        return "string"
    if origin is list:
        return {"type": "array", "items": avro_type(args[0])}
    if origin is dict:
        return {"type": "map", "values": avro_type(args[1])}
    if type(None) in args:
        return ["null", avro_type(next(a for a in args if a is not type(None)))]
    if isinstance(hint, type) and issubclass(hint, events.Event):
        return hint.__name__
    return {str: "string", float: "double", bytes: "bytes", bool: "boolean"}[hint]


def shallow(avro: Any, inner: dict[str, dict[str, Any]]) -> Any:
    """Replace nested records by their names and collect them."""
    if isinstance(avro, list):
        return [shallow(a, inner) for a in avro]
    if not isinstance(avro, dict):
        return avro.removeprefix("streamrft.")
    if avro["type"] == "record":
        inner[avro["name"]] = avro
        return avro["name"]
    return {k: shallow(v, inner) if k in ("items", "values") else v for k, v in avro.items()}


def assert_same(cls: type[events.Event], schema: dict[str, Any]) -> None:
    hints = get_type_hints(cls, include_extras=True)
    inner: dict[str, dict[str, Any]] = {}
    stated = {f["name"]: shallow(f["type"], inner) for f in schema["fields"]}
    assert list(stated.items()) == [(f, avro_type(hints[f])) for f in cls.__struct_fields__]
    for field, struct in zip(schema["fields"], msgspec.structs.fields(cls), strict=True):
        if struct.default is not msgspec.NODEFAULT:
            default = struct.default
        elif struct.default_factory is not msgspec.NODEFAULT:
            default = struct.default_factory()
        else:
            default = "required"
        assert field.get("default", "required") == default, f"{cls.__name__}.{field['name']}"
    for name, nested in inner.items():
        assert_same(getattr(events, name), nested)


@pytest.mark.parametrize("cls", events.EVENTS, ids=NAMES)
def test_typed_event_has_the_fields_types_and_defaults_of_its_schema(cls):
    assert_same(cls, codec.schema_of(cls))


@pytest.mark.parametrize("cls", events.EVENTS, ids=NAMES)
def test_every_field_says_what_it_means(cls):
    def undocumented(schema: Any, where: str) -> list[str]:
        if isinstance(schema, list):
            return [u for s in schema for u in undocumented(s, where)]
        if not isinstance(schema, dict):
            return []
        if schema["type"] != "record":
            return undocumented(schema.get("items", schema.get("values")), where)
        bare = [where] * (not schema.get("doc"))
        for field in schema["fields"]:
            place = f"{where}.{field['name']}"
            bare += [place] * (not field.get("doc")) + undocumented(field["type"], place)
        return bare

    assert undocumented(codec.schema_of(cls), cls.__name__) == []


@pytest.mark.parametrize("cls", events.EVENTS, ids=NAMES)
def test_current_schema_is_kept_in_history(cls):
    name = f"{cls.__name__}.{codec.fingerprint_of(codec.schema_of(cls)).hex()}.avsc"
    assert (Path(codec.__file__).parent / "history" / name).exists(), (
        f"{cls.__name__}.avsc changed. Keep the new version, so that its records stay readable:\n"
        f"    cp schemas/{cls.__name__}.avsc schemas/history/{name}"
    )


@pytest.mark.parametrize("path", HISTORY, ids=lambda p: p.stem)
def test_history_is_never_edited(path):
    schema = json.loads(path.read_text())
    assert path.name == f"{schema['name']}.{codec.fingerprint_of(schema).hex()}.avsc"


@pytest.mark.parametrize("path", HISTORY, ids=lambda p: p.stem)
def test_records_of_every_kept_schema_are_read_by_today_and_today_by_it(path):
    old = json.loads(path.read_text())
    cls = getattr(events, old["name"])
    assert isinstance(codec.decode(written_under(old), cls), cls)
    assert reads_today(old)


def written_under(schema: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record_of(schema))
    return codec.MARKER + codec.fingerprint_of(schema) + out.getvalue()


def reads_today(old: dict[str, Any]) -> bool:
    """An older program reads today's record through both schemas, without ours."""
    current = codec.schema_of(getattr(events, old["name"]))
    record = fastavro.schemaless_reader(
        io.BytesIO(written_under(current)[10:]),
        fastavro.parse_schema(current),
        fastavro.parse_schema(old),
    )
    return set(record) == {f["name"] for f in old["fields"]}


def test_record_from_before_a_field_existed_gets_its_default(release):
    old = codec.schema_of(events.Task)
    old["fields"] = [f for f in old["fields"] if f["name"] != "reward_fn"]
    with pytest.raises(codec.UndecodableRecord, match="unknown schema fingerprint"):
        codec.decode(written_under(old), events.Task)
    release(old)
    assert codec.decode(written_under(old), events.Task).reward_fn == ""
    assert reads_today(old)


def test_record_with_a_nested_field_since_removed_is_still_read(release):
    old = codec.schema_of(events.Cut)
    members = next(f for f in old["fields"] if f["name"] == "members")
    members["type"]["items"]["fields"].append({"name": "weight", "type": "double", "default": 1.0})
    release(old)
    assert codec.decode(written_under(old), events.Cut).members == []
    assert reads_today(old)


def test_a_change_that_old_records_cannot_survive_is_caught():
    old = codec.schema_of(events.Task)
    next(f for f in old["fields"] if f["name"] == "row")["type"] = "string"
    with pytest.raises(fastavro.read.SchemaResolutionError):
        reads_today(old)


@pytest.mark.parametrize(
    ("primitive", "expected"),
    [("null", 7195948357588979594), ("int", 8247732601305521295), ("long", -3434872931120570953)],
)
def test_fingerprint_is_the_avro_specifications(primitive, expected):
    """Expected numbers: Apache Avro's own share/test/data/schema-tests.txt."""
    found = codec.fingerprint_of({"type": primitive})
    assert int.from_bytes(found, "little", signed=True) == expected


def test_published_json_schema_is_the_one_the_decoder_applies():
    published = (Path(codec.__file__).parent / "reward.schema.json").read_text()
    assert json.loads(published) == codec.reward_json_schema(), (
        "write schemas/reward.schema.json anew from codec.reward_json_schema()"
    )
