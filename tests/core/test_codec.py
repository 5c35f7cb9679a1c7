"""Events survive the log and JSON; whatever breaks the contract is refused by name at the door."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.schemas import arrays, codec, events, plain
from streamrft.schemas.errors import EventTooLarge, InvalidEvent, UndecodableRecord

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
IDS = st.text("abcXYZ019._-", min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def trajectory(**changes: Any) -> events.Trajectory:
    """Four tokens, the last two written by policy_version 3."""
    sequence = events.Sequence(
        tokens=arrays.pack_ints([5, 6, 7, 8]),
        loss_mask=arrays.pack_mask([0, 0, 1, 1]),
        logprobs=arrays.pack_floats([0, 0, -0.5, -0.25]),
        policy_versions=arrays.pack_runs([3, 3]),
        turns=[events.Turn(role="user", start=0, end=2, text="2+2")],
    )
    event = events.Trajectory(
        trajectory_id="g.1:0:a",
        group_id="g.1",
        slot=0,
        attempt="a",
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=8,
        sequences=[sequence],
        finish_reason="stop",
        scores=[events.Score(source="accuracy", value=1.0)],
        reward_sources={"accuracy": 1.0},
        produced_at=1_700_000_000_000,
    )
    if any(name.startswith("s_") for name in changes):
        inner = {k[2:]: v for k, v in changes.items() if k.startswith("s_")}
        changes = {k: v for k, v in changes.items() if not k.startswith("s_")}
        changes["sequences"] = [msgspec.structs.replace(sequence, **inner)]
    return msgspec.structs.replace(event, **changes)


def reward(**changes: Any) -> events.Reward:
    event = events.Reward(event_id="r1", trajectory_id="g.1:0:a", source="judge", value=0.5)
    return msgspec.structs.replace(event, **changes)


@st.composite
def sequences(draw: st.DrawFn) -> events.Sequence:
    written = draw(st.lists(st.booleans(), min_size=1, max_size=20))
    n = len(written)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=n, max_size=n))
    versions = draw(st.lists(st.integers(0, 9), min_size=sum(written), max_size=sum(written)))
    return events.Sequence(
        tokens=arrays.pack_ints(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))),
        loss_mask=arrays.pack_mask(written),
        logprobs=arrays.pack_floats(logprobs),
        policy_versions=arrays.pack_runs(versions),
        temperature=draw(st.floats(0.01, 4)),
        truncated=draw(st.booleans()),
        turns=[events.Turn(role="user", start=0, end=n, text=draw(TEXT))],
    )


@st.composite
def trajectories(draw: st.DrawFn) -> events.Trajectory:
    group_id, slot, attempt = draw(IDS), draw(st.integers(0, 7)), draw(st.text("ab", min_size=1))
    parts = draw(st.lists(sequences(), min_size=1, max_size=3))
    low, high = arrays.run_bounds(p.policy_versions for p in parts)
    sources = draw(st.dictionaries(TEXT, NUMBERS, min_size=1, max_size=3))
    return trajectory(
        trajectory_id=events.trajectory_id(group_id, slot, attempt),
        group_id=group_id,
        slot=slot,
        attempt=attempt,
        sequences=parts,
        min_policy_version=low,
        max_policy_version=high,
        scores=[events.Score(source=s, value=draw(NUMBERS)) for s in sources],
        reward_sources=sources,
        metrics=draw(st.dictionaries(TEXT, NUMBERS, max_size=2)),
        reward_deadline_ms=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is events.Int or hint is events.Long:
        bits = 31 if hint is events.Int else 63
        return st.integers(-(2**bits), 2**bits - 1)
    if hasattr(hint, "__metadata__"):
        return st.lists(st.integers(0, 1), max_size=3).map(
            lambda v: np.asarray(v, hint.__metadata__[0].dtype).tobytes() * 2
        )
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(of_hint(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, of_hint(args[1]), max_size=3)
    if type(None) in args:
        return st.none() | of_hint(next(a for a in args if a is not type(None)))
    if isinstance(hint, type) and issubclass(hint, events.Event):
        return of_type(hint)
    return {str: TEXT, float: NUMBERS, bytes: st.binary(max_size=9), bool: st.booleans()}[hint]


def of_type(cls: type[events.Event]) -> st.SearchStrategy[Any]:
    """Honest events of any type, by their field types."""
    special: dict[type[events.Event], dict[str, st.SearchStrategy[Any]]] = {
        events.Task: {"group_id": IDS, "group_size": st.integers(1, 64)},
        events.Reward: {
            "event_id": IDS,
            "trajectory_id": IDS.map(lambda g: f"{g}:0:a"),
            "source": IDS,
            "revision": st.integers(0, 9),
            "span": st.none(),
        },
        events.Experience: {"trajectory": trajectories().map(codec.encode)},
    }
    if cls is events.Trajectory:
        return trajectories()
    hints = get_type_hints(cls, include_extras=True)
    fields = {name: of_hint(hints[name]) for name in cls.__struct_fields__}
    return st.builds(cls, **(fields | special.get(cls, {})))


@pytest.mark.parametrize("cls", events.EVENTS, ids=lambda c: c.__name__)
@given(choices=st.data())
def test_every_event_survives_the_log_and_json(cls, choices):
    event = choices.draw(of_type(cls))
    assert codec.decode(codec.encode(event), cls) == event
    as_json = json.loads(json.dumps(plain.to_plain(event)))
    assert plain.from_plain(cls, as_json) == event


def test_value_is_marker_fingerprint_and_avro_body():
    event = events.Branch(branch="b", parent="main", step=90, produced_at=1)
    by_hand = b"\x02b" + b"\x08main" + b"\xb4\x01" + b"\x02"
    assert codec.encode(event) == bytes.fromhex("c30183ff93a6b7e6b096") + by_hand


@given(where=st.integers(0), flip=st.integers(1, 255), cut=st.integers(0))
def test_damaged_bytes_never_surprise_a_reader(where, flip, cut):
    value = codec.encode(trajectory())
    damaged = bytearray(value)
    damaged[where % len(value)] ^= flip
    for bad in (bytes(damaged), value[: cut % len(value)], value + b"\x00"):
        try:
            codec.decode(bad, events.Trajectory)
        except (UndecodableRecord, InvalidEvent) as error:
            assert str(error)
    with pytest.raises(UndecodableRecord):
        codec.decode(value[: cut % len(value)], events.Trajectory)


@dataclass(frozen=True)
class Bad:
    name: str
    value: bytes | None
    match: str


UNDECODABLE = [
    Bad("no value", None, "no value"),
    Bad("nothing", b"", "beginning with nothing"),
    Bad("text", b"hello", "no Avro single-object record"),
    Bad("unknown", b"\xc3\x01" + b"\x00" * 9, "unknown schema fingerprint 0{16}"),
    Bad("trailing", codec.encode(reward()) + b"x", "1 bytes after its end"),
    Bad("another type", codec.encode(trajectory()), "Trajectory found, Reward expected"),
    Bad("cut JSON", b'{"event_id": "r1"', "JSON reward: .*reward.schema.json"),
    Bad("JSON typo", b'{"event_id":"r","trajectory_id":"g:0:a","source":"s","val":1}', "val"),
    Bad(
        "JSON span typo",
        b'{"event_id":"r","trajectory_id":"g:0:a","source":"s","value":1,'
        b'"span":{"sequence":0,"start":0,"end":1,"stop":2}}',
        "stop",
    ),
    Bad(
        "JSON string as value",
        b'{"event_id":"r","trajectory_id":"g:0:a","source":"s","value":"1"}',
        "Expected `float`",
    ),
]


@pytest.mark.parametrize("case", UNDECODABLE, ids=lambda c: c.name)
def test_what_is_no_event_says_what_it_is(case):
    with pytest.raises(UndecodableRecord, match=case.match):
        codec.decode(case.value, events.Reward)


def test_json_reward_is_the_same_event_as_its_avro_form():
    as_json = b'{"event_id": "r1", "trajectory_id": "g.1:0:a", "source": "judge", "value": 0.5}'
    assert codec.decode(as_json, events.Reward) == reward()
    assert codec.decode(codec.encode(reward()), events.Reward) == reward()


def test_json_reward_is_held_to_the_same_rules():
    with pytest.raises(InvalidEvent, match="<group_id>:<slot>:<attempt>"):
        codec.decode(b'{"event_id":"r","trajectory_id":"g","source":"s","value":1}', events.Reward)


def test_json_is_read_only_where_a_reward_is_expected():
    with pytest.raises(UndecodableRecord, match="no Avro single-object record"):
        codec.decode(b'{"event_id": "r1"}', events.Trajectory)


@dataclass(frozen=True)
class Broken:
    change: dict[str, Any]
    match: str


BROKEN_TRAJECTORIES = [
    Broken({"trajectory_id": "g.1:1:a"}, "is not <group_id>:<slot>:<attempt> of its own"),
    Broken({"trajectory_id": "g.1:0:a:b", "attempt": "a:b"}, "token without ':'"),
    Broken({"trajectory_id": "g 1:0:a", "group_id": "g 1"}, "is no id"),
    Broken({"trajectory_id": "g.1:8:a", "slot": 8}, "lies outside the group's 0..7"),
    Broken({"reward_sources": {}}, "name a source"),
    Broken({"reward_sources": {"accuracy": float("nan")}}, "nan is not a finite number"),
    Broken({"finish_reason": "failed"}, "failure goes with finish_reason 'failed'"),
    Broken({"failure": "boom"}, "failure goes with finish_reason 'failed'"),
    Broken({"sequences": []}, "a rollout without tokens is finish_reason 'failed'"),
    Broken({"scores": [events.Score(source="judge", value=1.0)]}, "'judge' is not in reward_sou"),
    Broken({"scores": [events.Score(source="accuracy", value=float("inf"))]}, "not a finite"),
    Broken(
        {
            "scores": [
                events.Score(
                    source="accuracy",
                    value=1.0,
                    span=events.Span(sequence=0, start=2, end=9),
                )
            ]
        },
        r"\[2, 9\) lies outside its 4 tokens",
    ),
    Broken({"min_policy_version": 2}, "say 2 to 3, its tokens 3 to 3"),
    Broken({"s_tokens": b"\x00" * 12}, "tokens 3, loss_mask 4, logprobs 4"),
    Broken({"s_logprobs": b"\x00" * 15}, "logprobs 3.75"),
    Broken({"s_loss_mask": b"\x00\x00\x01\x02"}, "other than 0 and 1"),
    Broken({"s_policy_versions": arrays.pack_runs([3])}, "covers 1 tokens, loss_mask marks 2"),
    Broken({"s_policy_versions": arrays.pack_ints([3, 4, 3, -2])}, "has a run of -2 tokens"),
    Broken({"s_policy_versions": b"\x00" * 7}, "no .value, count. pairs"),
    Broken({"s_logprobs": arrays.pack_floats([0, 0, np.nan, 0])}, "not finite"),
    Broken({"s_logprobs": arrays.pack_floats([0, 0, -np.inf, 0])}, "not finite"),
    Broken({"s_temperature": 0.0}, "no positive number"),
    Broken(
        {"s_turns": [events.Turn(role="user", start=3, end=5, text="")]},
        r"turns\[0\] \[3, 5\) lies outside",
    ),
    Broken({"epoch": 1.5}, "Expected `int`"),
    Broken({"epoch": 2**31}, "<= 2147483647"),
    Broken({"number": 2**70}, "number"),
    Broken({"producer": None}, "Expected `str`"),
    Broken({"producer": "\ud800"}, "surrogates"),
    Broken({"metrics": {"tokens": "many"}}, "Expected `float`"),
    Broken({"sequences": [{}]}, "Trajectory: "),
]


@pytest.mark.parametrize("case", BROKEN_TRAJECTORIES, ids=lambda c: " ".join(c.change))
def test_broken_trajectory_is_refused_before_it_is_written(case):
    with pytest.raises(InvalidEvent, match=case.match):
        codec.encode(trajectory(**case.change))


def test_log_probs_near_the_end_of_the_range_are_no_infinity():
    huge = arrays.pack_floats([0, 0, -3e38, -3e38])
    assert codec.encode(trajectory(s_logprobs=huge))


BROKEN_REWARDS = [
    Broken({"event_id": "r 1"}, "is no id"),
    Broken({"trajectory_id": "g.1"}, "<group_id>:<slot>:<attempt>"),
    Broken({"trajectory_id": "g.1:0"}, "<group_id>:<slot>:<attempt>"),
    Broken({"source": ""}, "name who scored"),
    Broken({"value": float("nan")}, "nan is not a finite number"),
    Broken({"revision": -1}, "-1 is negative"),
    Broken({"span": events.Span(sequence=0, start=4, end=4)}, "no range of tokens"),
]


@pytest.mark.parametrize("case", BROKEN_REWARDS, ids=lambda c: " ".join(c.change))
def test_broken_reward_is_refused_before_it_is_written(case):
    with pytest.raises(InvalidEvent, match=case.match):
        codec.encode(reward(**case.change))


def test_failed_rollout_needs_no_tokens_and_no_sources():
    failed = trajectory(
        finish_reason="failed", failure="time-out", sequences=[], scores=[], reward_sources={}
    )
    assert codec.decode(codec.encode(failed), events.Trajectory).is_failed


def test_event_over_its_limit_names_both_sizes():
    size = len(codec.encode(trajectory()))
    assert codec.encode(trajectory(), max_bytes=size)
    with pytest.raises(EventTooLarge, match=f"{size:,} bytes encoded, the limit is {size - 1:,}"):
        codec.encode(trajectory(), max_bytes=size - 1)


def test_event_time_ahead_of_the_log_is_refused():
    from streamrft.schemas.validate import check_time

    check_time(61_000, 1_000, 60_000)
    with pytest.raises(InvalidEvent, match=r"60.0 s after the log's own time"):
        check_time(61_001, 1_000, 60_000)


def test_siblings_encode_as_each_alone():
    group = [
        events.GroupMember(slot=i, trajectory_id=f"g:{i}:a", reward=float(i)) for i in range(3)
    ]
    experiences = [
        events.Experience(
            trajectory_id=f"g:{i}:a",
            reward_revision=0,
            group_id="g",
            slot=i,
            number=1,
            branch="main",
            min_policy_version=0,
            max_policy_version=0,
            num_tokens=2,
            num_trained_tokens=1,
            reward=float(i),
            reward_parts={"judge": float(i)},
            group=group,
            group_experiences=3,
            loss_mask=bytes(2) if i else None,
            metrics={"a": 1.0},
            trajectory=b"trajectory",
            trajectory_partition=0,
            trajectory_offset=i,
            produced_at=5,
        )
        for i in range(3)
    ]
    assert codec.encode_siblings(experiences) == [codec.encode(e) for e in experiences]
    assert codec.encode_siblings([]) == []


def test_the_first_fields_of_a_broken_record_can_be_read():
    value = codec.encode(events.Ended(branch="main", num_groups=3, produced_at=5))
    assert codec.peek(value[:-1], events.Ended, 2) == {"branch": "main", "num_groups": 3}
    assert codec.peek(value[:12], events.Ended, 2) == {}
    assert codec.peek(value, events.Task, 1) == codec.peek(b"{}", events.Ended, 1) == {}
