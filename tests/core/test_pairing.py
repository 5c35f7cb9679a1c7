"""Groups of the log become pairs: the best and the worst member, everybody else a named drop."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_feed import experience

from streamrft.consumers.sources.groups import GroupAssembly
from streamrft.consumers.sources.members import BatchRules
from streamrft.schemas import events as ev
from streamrft.streams.lineage import Lineage

MAIN = Lineage.of("main", [])


def assembly(position=None, **rules) -> GroupAssembly:
    return GroupAssembly(
        BatchRules(1, in_pairs=True, **rules), MAIN, "main", 1, json.loads(json.dumps(position))
    )


def members(number: int, rewards: Sequence[float], versions: Sequence[int] = ()):
    """One experience a reward."""
    for slot, reward in enumerate(rewards):
        version = versions[slot] if versions else 0
        yield msgspec.structs.replace(
            experience(number, 0, version=version),
            slot=slot,
            trajectory_id=f"rows.{number}:{slot}:a",
            reward=reward,
            group_experiences=len(rewards),
        )


def feed(groups: GroupAssembly, experiences, start: int = 0, steps_done: int = 0) -> list[ev.Drop]:
    for offset, e in enumerate(experiences, start):
        groups.on_experience(e, 0, offset)
    return groups.judge(steps_done, now_ms=1)


def slots(groups: GroupAssembly) -> list[int]:
    return [m.slot for m in groups.select() or ()]


@pytest.mark.parametrize(
    "rewards, pair",
    [
        ([0.0, 1.0], [1, 0]),
        ([0.2, 0.9, 0.1, 0.5], [1, 2]),
        ([1.0, 0.0, 1.0, 0.0], [0, 1]),
        ([0.5, 0.5, 0.5, 0.4], [0, 3]),
        ([math.nan, 1.0, 0.0, math.inf], [1, 2]),
    ],
)
def test_the_best_is_preferred_to_the_worst_and_the_lowest_slot_among_equals(rewards, pair):
    groups = assembly()
    drops = feed(groups, members(0, rewards))
    assert slots(groups) == pair
    assert {d.slot for d in drops} == set(range(len(rewards))) - set(pair)
    assert {d.reason for d in drops} <= {"filtered"} and all(d.detail for d in drops)


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [1.0], [math.nan, math.nan], [math.nan, 1.0]])
def test_a_group_without_two_different_rewards_is_dropped_whole(rewards: list[float]):
    groups = assembly()
    drops = feed(groups, members(0, rewards))
    assert sorted(d.slot for d in drops) == list(range(len(rewards)))
    assert all(d.where == "trainer" and d.group_experiences == len(rewards) for d in drops)
    groups.on_ended(ev.Ended(branch="main", num_groups=1, produced_at=1))
    assert groups.select() is None and groups.is_finished


def test_nothing_is_paired_before_its_group_is_whole():
    groups, all_of = assembly(), list(members(0, [0.0, 0.5, 1.0]))
    assert feed(groups, all_of[:2]) == [] and groups.select() is None
    assert [d.slot for d in feed(groups, all_of[2:], start=2)] == [1]


def test_a_stale_member_is_in_no_pair_and_a_pair_that_loses_one_is_dropped():
    groups = assembly(max_staleness=1)
    drops = feed(groups, members(0, [1.0, 0.6, 0.2], [0, 2, 1]), steps_done=2)
    assert [(d.slot, d.reason) for d in drops] == [(0, "stale")] and slots(groups) == [1, 2]
    drops = groups.judge(3, now_ms=2)
    assert [(d.slot, d.reason) for d in drops] == [(2, "stale"), (1, "filtered")]
    assert groups.num_waiting == 0


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), max_size=4),
    st.randoms(use_true_random=False),
    st.integers(0, 16),
)
def test_every_member_is_paired_or_dropped_once_whatever_the_order_and_the_restart(
    rewards: list[list[float]], random, crash_at: int
):
    events = [e for n, of_group in enumerate(rewards) for e in members(n, of_group)]
    random.shuffle(events)
    groups = assembly()
    drops = feed(groups, events[:crash_at])
    again = assembly(groups.position())
    drops += feed(again, events)
    trained: list[str] = []
    while (batch := again.select()) is not None:
        best, worst = batch
        assert best.reward > worst.reward and best.group_id == worst.group_id
        trained += [m.trajectory_id for m in batch]
        again.take([(m.group_id, m.number, m.partition, m.offset) for m in batch])
    ends = trained + [d.trajectory_id for d in drops]
    assert sorted(ends) == sorted(e.trajectory_id for e in events)
    assert again.num_waiting == 0
