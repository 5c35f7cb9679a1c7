"""From a closed group to experiences and drops."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from join_scripts import SETTINGS, Runner, rew, scored, sequence, traj

from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import StorageUnavailable
from streamrft.streams.join.outcomes import Closed, JoinedMember
from streamrft.streams.payloads import Payload, PayloadCache
from streamrft.streams.pipeline import Pipeline, token_rewards
from streamrft.streams.settings import OperatorSettings


def with_filters(*names: str, **args) -> Runner:
    filters = tuple(OperatorSettings(name, args.get(name, {})) for name in names)
    return Runner(replace(SETTINGS, filters=filters))


def test_drops_and_experiences_of_a_close_agree_on_how_many_it_emitted():
    runner = with_filters("reward_filter", reward_filter={"threshold": 1.0})
    runner.feed(*[scored(f"g:{i}:a", float(i), size=3) for i in range(3)])
    assert [(e.slot, e.group_experiences, len(e.group)) for e in runner.experiences] == [
        (1, 2, 3),
        (2, 2, 3),
    ]
    assert [(d.slot, d.reason, d.where, d.group_experiences) for d in runner.drops] == [
        (0, "filtered", "reward_filter", 2)
    ]


def test_shaped_rewards_are_the_rewards_of_the_whole_group():
    shape = {"stats_key": "judge", "op": "MUL", "weight": 10.0}
    runner = with_filters(
        "reward_filter",
        "reward_shaping_mapper",
        reward_filter={"threshold": 2.0},
        reward_shaping_mapper=shape,
    )
    runner.feed(*[scored(f"g:{i}:a", float(i), size=3) for i in range(3)])
    (e,) = runner.experiences
    assert e.reward == 40.0
    assert [m.reward for m in e.group] == [0.0, 10.0, 40.0]


def test_a_masked_experience_counts_its_trained_tokens_anew():
    runner = with_filters("mask_response_truncated")
    runner.feed(scored("g:0:a", 1.0, sequences=[sequence(4, truncated=True)]))
    (e,) = runner.experiences
    assert (e.num_tokens, e.num_trained_tokens, e.loss_mask) == (4, 0, bytes(4))


def test_spans_become_rewards_by_token_that_add_up_to_the_reward():
    spans = [ev.Span(sequence=0, start=1, end=3), ev.Span(sequence=1, start=0, end=2)]
    t = traj(
        sequences=[sequence(4), sequence(3)],
        reward_sources={"step": 2.0, "judge": 1.0},
        scores=[
            ev.Score(source="step", value=v, span=s) for v, s in zip((1, 3), spans, strict=True)
        ],
    )
    runner = Runner()
    runner.feed(t, rew(value=0.5))
    (e,) = runner.experiences
    assert e.reward == 8.5
    assert e.token_rewards is not None
    assert arrays.floats(e.token_rewards).tolist() == [0, 0, 2, 0, 0, 6, 0.5]


def test_token_rewards_outside_unknown_tokens_lie_on_the_last_one():
    packed = token_rewards([(4, 0, 2, 1.0), (0, 0, 9, 1.0)], (2, 1), 3.0)
    assert packed is not None
    assert np.allclose(arrays.floats(packed), [0, 0, 3.0])
    assert token_rewards([], (2,), 3.0) is None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reward_that_overflows_is_an_invalid_drop(value):
    runner = with_filters("reward_shaping_mapper", reward_shaping_mapper={"stats_key": "x"})
    runner.feed(scored("g:0:a", 1.0, size=2, metrics={"x": value}), scored("g:1:a", 1.0, size=2))
    assert [(e.slot, len(e.group)) for e in runner.experiences] == [(1, 1)]
    assert [(d.slot, d.reason, d.group_experiences) for d in runner.drops] == [(0, "invalid", 1)]


def test_an_experience_over_the_limit_is_an_invalid_drop_with_its_size():
    runner = Runner(replace(SETTINGS, max_event_bytes=3_000))
    runner.feed(
        scored("g:0:a", 1.0, size=2, sequences=[sequence(400)]), scored("g:1:a", 1.0, size=2)
    )
    assert [e.slot for e in runner.experiences] == [1]
    assert "max_event_bytes 3,000" in runner.drops[0].detail


def closed(*slots: int, revision: int = 0) -> tuple[Closed, dict[int, Payload]]:
    members, payloads = [], {}
    for slot in slots:
        t = traj(f"g:{slot}:a", size=len(slots))
        members.append(JoinedMember(slot, t.trajectory_id, slot, 1.0, {"judge": 1.0}, []))
        payloads[slot] = Payload.of(codec.encode(t), t)
    return Closed("g", 7, len(slots), revision, members, []), payloads


def test_a_member_whose_record_is_gone_is_an_invalid_drop():
    group, payloads = closed(0, 1)
    del payloads[0]
    made = Pipeline(SETTINGS).run(group, payloads, partition=0, now_ms=5)
    assert [(d.slot, d.reason, d.produced_at) for d in made.drops] == [(0, "invalid", 5)]
    assert [e.group_experiences for e in made.experiences] == [1]


def test_an_amended_group_gives_experiences_but_no_final_state():
    group, payloads = closed(0, 1, revision=2)
    settings = replace(SETTINGS, filters=(OperatorSettings("reward_std_filter"),))
    assert not Pipeline(settings).run(group, payloads, partition=0, now_ms=5).drops
    made = Pipeline(SETTINGS).run(group, payloads, partition=0, now_ms=5)
    assert [e.reward_revision for e in made.experiences] == [2, 2]


class Away:
    """A user's operator whose service does not answer."""

    def apply(self, group):
        raise StorageUnavailable("the service is away")

    def of(self, member, group):
        raise ValueError("no number")


class Careless:
    """A user's mapper that leaves in a member what no experience can carry."""

    def __init__(self, field: str, value: object) -> None:
        self.field, self.value = field, value

    def apply(self, group):
        setattr(group.members[0], self.field, self.value)
        return []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", "high"),
        ("reward", None),
        ("metrics", {"a": "b"}),
        ("loss_mask", b"\1"),
        ("loss_mask", b"\2\1\1\1"),
    ],
)
def test_what_an_operator_leaves_unsound_is_an_invalid_drop(monkeypatch, field, value):
    monkeypatch.setitem(sys.modules, "users_operators", SimpleNamespace(Careless=Careless))
    name = "users_operators.Careless"
    runner = with_filters(name, **{name: {"field": field, "value": value}})
    runner.feed(*[scored(f"g:{i}:a", 1.0, size=2) for i in range(2)])
    assert [(e.slot, e.group_experiences) for e in runner.experiences] == [(1, 1)]
    assert [(d.slot, d.reason, d.where) for d in runner.drops] == [(0, "invalid", name)]


@pytest.fixture
def users_class(monkeypatch) -> str:
    """Dotted path of a class of the user."""
    monkeypatch.setitem(sys.modules, "users_operators", SimpleNamespace(Away=Away))
    return "users_operators.Away"


def test_a_retriable_error_of_an_operator_passes_through(users_class):
    group, payloads = closed(0)
    pipeline = Pipeline(replace(SETTINGS, filters=(OperatorSettings(users_class),)))
    with pytest.raises(StorageUnavailable):
        pipeline.run(group, payloads, partition=0, now_ms=0)


def test_what_a_priority_raises_refuses_the_member(users_class):
    group, payloads = closed(0)
    made = Pipeline(replace(SETTINGS, priority=OperatorSettings(users_class))).run(
        group, payloads, partition=0, now_ms=0
    )
    assert made.failures == [(0, "priority: ValueError: no number")]
    assert [(d.reason, d.where, d.group_experiences) for d in made.drops] == [
        ("invalid", "priority", 0)
    ]


def test_the_cache_keeps_the_newest_within_its_bound():
    t = traj()
    payload = Payload.of(codec.encode(t), t)
    cache = PayloadCache(3 * payload.size_bytes)
    for offset in range(5):
        cache.put(offset, payload)
    cache.put(4, payload)
    assert [offset for offset in range(5) if cache.get(offset)] == [2, 3, 4]
    assert cache.size_bytes == 3 * payload.size_bytes
    cache.discard(3)
    cache.discard(3)
    assert cache.size_bytes == 2 * payload.size_bytes
