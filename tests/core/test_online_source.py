"""Groups become batches: once each, never stale, whatever the order, repeats and crashes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_feed import ended, experience, group

from streamrft.consumers.sources.groups import GroupAssembly
from streamrft.consumers.sources.members import BatchRules, Member
from streamrft.consumers.sources.positions import ClosedGroups, FinalOffsets
from streamrft.schemas import events as ev
from streamrft.streams.lineage import Lineage

MAIN = Lineage.of("main", [])
FORK = ev.Branch(branch="main.5", parent="main", step=5, produced_at=1)
FORKED = Lineage.of("main.5", [FORK])


def rules(batch_groups: int = 2, **fields) -> BatchRules:
    return BatchRules(batch_groups, **fields)


def assembly(position=None, *, lineage: Lineage = MAIN, **fields) -> GroupAssembly:
    return GroupAssembly(rules(**fields), lineage, lineage.branch, 1, position)


def feed(groups: GroupAssembly, experiences: Iterable[ev.Experience], start: int = 0) -> None:
    for offset, e in enumerate(experiences, start):
        groups.on_experience(e, 0, offset)


def ids(members: Sequence[Member] | None) -> list[str]:
    return [m.trajectory_id for m in members or ()]


def take(groups: GroupAssembly, members: Sequence[Member]) -> None:
    groups.take([(m.group_id, m.number, m.partition, m.offset) for m in members])


def dead(number: int, **fields) -> ev.Drop:
    name = f"rows.{number}"
    return ev.Drop(
        **{
            "trajectory_id": f"{name}:0:a",
            "group_id": name,
            "slot": 0,
            "number": number,
            "reason": "filtered",
            "detail": "no variance",
            "where": "reward_std_filter",
            "group_experiences": 0,
            "produced_at": 1,
            **fields,
        }
    )


# --- batches


def test_batch_waits_for_whole_groups():
    groups = assembly()
    feed(groups, [experience(0, 0), experience(1, 0), experience(1, 1)])
    assert groups.select() is None
    feed(groups, [experience(0, 1)], start=3)
    assert ids(groups.select()) == ["rows.0:0:a", "rows.0:1:a", "rows.1:0:a", "rows.1:1:a"]


def test_an_ended_from_before_the_steps_were_raised_makes_no_short_batch():
    groups = assembly(ends_by_steps=True)
    groups.on_ended(ended(1))
    feed(groups, group(0))
    assert groups.select() is None and not groups.is_finished


def test_batch_takes_the_highest_priority_first():
    groups = assembly()
    feed(groups, group(1, version=1) + group(2, version=2, priority=3.0) + group(3, version=3))
    assert [m.number for m in groups.select() or ()] == [2, 2, 1, 1]


def test_batch_takes_the_oldest_policy_version_first_then_the_number():
    groups = assembly()
    feed(groups, group(1, version=2) + group(3, version=1) + group(2, version=1))
    assert [m.number for m in groups.select() or ()] == [2, 2, 3, 3]


def test_members_follow_their_slots_whatever_their_arrival():
    groups = assembly(batch_groups=1)
    feed(groups, reversed(group(0)))
    assert [m.slot for m in groups.select() or ()] == [0, 1]


def test_selecting_changes_nothing():
    groups = assembly(batch_groups=1)
    feed(groups, group(0))
    before = groups.position()
    assert ids(groups.select()) == ids(groups.select())
    assert groups.position() == before


def test_group_that_emitted_fewer_is_whole_with_fewer():
    groups = assembly(batch_groups=1)
    feed(groups, [experience(0, 1, group_experiences=1)])
    assert ids(groups.select()) == ["rows.0:1:a"]


def test_repeats_and_amendments_are_ignored_and_final():
    groups = assembly(batch_groups=1)
    feed(groups, [*group(0), *group(0), experience(0, 0, reward_revision=1)])
    take(groups, groups.select() or ())
    feed(groups, group(0), start=5)
    assert groups.select() is None
    assert groups.num_ignored == 5
    assert groups.position()["experiences"] == {"0": {"next": 7, "final": []}}


def test_short_batch_trains_when_every_group_is_settled():
    groups = assembly()
    feed(groups, [*group(0), experience(1, 0)])
    groups.on_ended(ended(3))
    groups.on_drop(dead(2))
    assert groups.select() is None, "group 1 is not whole"
    feed(groups, [experience(1, 1), *group(3)], start=3)
    groups.on_ended(ended(4))
    first = groups.select() or ()
    assert [m.number for m in first] == [0, 0, 1, 1]
    take(groups, first)
    assert not groups.is_finished
    last = groups.select() or ()
    assert [m.number for m in last] == [3, 3]
    take(groups, last)
    assert groups.is_finished


def test_end_of_another_branch_ends_nothing():
    groups = assembly(lineage=FORKED)
    groups.on_ended(ended(0, branch="main"))
    assert not groups.is_finished
    groups.on_ended(ended(0, branch="main.5"))
    assert groups.is_finished


def test_deterministic_batch_waits_for_the_lower_number_and_says_so():
    groups = assembly(in_number_order=True)
    feed(groups, group(1) + group(2) + group(3))
    assert groups.select() is None
    assert "3 ready, 0 incomplete" in groups.blocker(1)
    assert groups.blocker(1).endswith("in order of publication, 0 is next")
    groups.on_drop(dead(0))
    assert [m.number for m in groups.select() or ()] == [1, 1, 2, 2]
    assert groups.blocker(1).endswith("4 is next")


def test_blocker_names_the_oldest_group():
    groups = assembly()
    feed(groups, [*group(7), experience(4, 1)])
    assert groups.blocker(3) == (
        "experiences: step 3 needs 2 groups, has 1 ready, 1 incomplete; oldest pending group "
        "rows.4 (1 of 2 read)"
    )


# --- drops


def test_stale_member_is_dropped_with_its_numbers():
    groups = assembly(batch_groups=1, max_staleness=2)
    feed(groups, [experience(0, 0, version=1), experience(0, 1, version=2)])
    (drop,) = groups.judge(4, now_ms=9)
    assert (drop.trajectory_id, drop.reason, drop.where) == ("rows.0:0:a", "stale", "trainer")
    assert (drop.branch, drop.step, drop.group_experiences) == ("main", 4, 2)
    assert drop.detail == "policy_version 1 is 3 behind the trainer's 4; max_staleness is 2"
    assert ids(groups.select()) == ["rows.0:1:a"]
    assert groups.judge(4, now_ms=9) == []


def test_group_that_lost_every_member_is_dead():
    groups = assembly(max_staleness=0)
    feed(groups, group(0))
    assert len(groups.judge(1, now_ms=9)) == 2
    groups.on_ended(ended(1))
    assert groups.is_finished


@dataclass(frozen=True)
class Limit:
    limits: dict[str, int | None]
    sources: tuple[str, ...]
    expected: int | None


@pytest.mark.parametrize(
    "case",
    [
        Limit({}, ("a",), 1),
        Limit({"b": 5}, ("a",), 1),
        Limit({"a": 5}, ("a", "b"), 5),
        Limit({"a": 0}, ("a",), 1),
        Limit({"a": None}, ("a", "b"), None),
    ],
    ids=str,
)
def test_laxest_staleness_of_the_sources_counts(case: Limit):
    found = rules(max_staleness=1, source_max_staleness=case.limits).limit(case.sources)
    assert found == case.expected


def test_ancestors_tokens_up_to_the_fork_are_in_lineage():
    groups = assembly(lineage=FORKED)
    feed(groups, group(0, version=5) + group(1, version=6) + group(2, version=6, branch="main.5"))
    drops = groups.judge(5, now_ms=9)
    assert {(d.number, d.reason, d.branch) for d in drops} == {(1, "off_lineage", "main.5")}
    assert [m.number for m in groups.select() or ()] == [0, 0, 2, 2]


def test_group_is_off_lineage_as_a_whole():
    groups = assembly(lineage=FORKED, batch_groups=1)
    feed(groups, [experience(0, 0, version=5)])
    assert groups.judge(5, now_ms=9) == []
    feed(groups, [experience(0, 1, version=6)], start=1)
    assert [d.slot for d in groups.judge(5, now_ms=9)] == [1, 0]
    groups.on_ended(ended(0, branch="main.5"))
    assert groups.is_finished, "a group off lineage does not count among the published"


@pytest.mark.parametrize(("branch", "step", "counts"), [("main", 5, True), ("main", 6, False)])
def test_trainers_drops_count_on_their_lineage_only(branch: str, step: int, counts: bool):
    groups = assembly(lineage=FORKED, batch_groups=1)
    for slot in (0, 1):
        name = f"rows.0:{slot}:a"
        drop = dead(0, trajectory_id=name, slot=slot, reason="stale", group_experiences=2)
        fields = {f: getattr(drop, f) for f in drop.__struct_fields__}
        groups.on_drop(ev.Drop(**fields | {"where": "trainer", "branch": branch, "step": step}))
    feed(groups, group(0))
    assert (groups.select() is None) is counts


def test_unreadable_record_does_not_hold_its_neighbours():
    groups = assembly(batch_groups=1)
    assert groups.is_news("rows.0", 0, 0, 0)
    groups.on_unreadable("rows.0", 0, "0@0", 0, 0)
    assert not groups.is_news("rows.0", 0, 0, 0)
    feed(groups, [experience(0, 1)], start=1)
    assert ids(groups.select()) == ["rows.0:1:a"]


# --- whole histories


@dataclass
class World:
    """A log of experiences and a trainer that may lose its memory at any time."""

    experiences: list[ev.Experience]
    in_number_order: bool
    max_staleness: int | None
    num_groups: int
    batches: list[list[str]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    step: int = 0
    read: int = 0

    def __post_init__(self) -> None:
        self.groups = self.open(None)
        self.saved = json.dumps(self.groups.position())

    def open(self, position) -> GroupAssembly:
        groups = assembly(
            position, in_number_order=self.in_number_order, max_staleness=self.max_staleness
        )
        groups.on_ended(ended(self.num_groups))
        self.read = groups.offsets[0].lowest
        return groups

    def read_some(self, count: int) -> None:
        for e in self.experiences[self.read : self.read + count]:
            self.groups.on_experience(e, 0, self.read)
            self.read += 1
        for drop in self.groups.judge(self.step, now_ms=1):
            assert drop.trajectory_id not in self.dropped, "dropped twice"
            self.dropped.add(drop.trajectory_id)

    def train(self) -> None:
        while (members := self.groups.select()) is not None:
            for m in members:
                assert self.max_staleness is None or (
                    self.step - m.min_policy_version <= self.max_staleness
                )
            self.batches.append(ids(members))
            take(self.groups, members)
            self.step += 1
            self.read_some(0)
            self.saved = json.dumps(self.groups.position())

    def crash(self) -> None:
        """What was acknowledged stays: cuts (all of them saved here) and published drops."""
        self.groups = self.open(json.loads(self.saved))
        for name in sorted(self.dropped):
            number = int(name.split(":")[0].removeprefix("rows."))
            slot = int(name.split(":")[1])
            drop = dead(number, trajectory_id=name, slot=slot, reason="stale", group_experiences=2)
            fields = {f: getattr(drop, f) for f in drop.__struct_fields__}
            self.groups.on_drop(
                ev.Drop(**fields | {"where": "trainer", "branch": "main", "step": self.step})
            )


@st.composite
def histories(draw: st.DrawFn) -> tuple[World, list[int]]:
    num_groups = draw(st.integers(1, 7))
    members = [e for n in range(num_groups) for e in group(n, version=draw(st.integers(0, 2)))]
    order = draw(st.permutations(members))
    repeats = draw(st.lists(st.sampled_from(members), max_size=4))
    world = World(
        [*order, *repeats],
        in_number_order=draw(st.booleans()),
        max_staleness=draw(st.sampled_from([None, 0, 1, 2])),
        num_groups=num_groups,
    )
    return world, draw(st.lists(st.integers(0, 5), max_size=10))


@settings(max_examples=300)
@given(histories())
def test_every_experience_is_trained_or_dropped_once_whatever_happens(history):
    world, plan = history
    for count in plan:
        if count == 0:
            world.crash()
        world.read_some(count)
        world.train()
    world.read_some(len(world.experiences))
    world.train()
    trained = [i for batch in world.batches for i in batch]
    assert len(trained) == len(set(trained)), "trained twice"
    assert not set(trained) & world.dropped
    assert set(trained) | world.dropped == {e.trajectory_id for e in world.experiences}
    numbers = [{i.split(":")[0] for i in batch} for batch in world.batches]
    assert all(len(n) == 2 for n in numbers[:-1]), "only the last batch may be short"
    assert world.groups.is_finished
    assert world.groups.num_waiting == 0
    end = len(world.experiences)
    assert world.groups.position()["experiences"]["0"] == {"next": end, "final": []}


@given(st.permutations(range(8)), st.integers(0, 7))
def test_final_offsets_are_the_lowest_open_and_those_above(order: list[int], count: int):
    offsets = FinalOffsets()
    for o in range(0, 16, 2):  # holes, as transaction markers leave them
        assert offsets.read(o)
    final = [2 * o for o in order[:count]]
    for o in final:
        offsets.finish(o)
    lowest = min(set(range(0, 16, 2)) - set(final), default=15)
    assert offsets.position() == {"next": lowest, "final": sorted(o for o in final if o > lowest)}
    again = FinalOffsets(lowest, offsets.position()["final"])
    assert [o for o in range(lowest, 16) if again.read(o)] == sorted(
        set(range(lowest, 16)) - set(final)
    )


@given(st.permutations(range(6)))
def test_closed_groups_stay_small_in_any_order(order: list[int]):
    closed = ClosedGroups()
    for n in order:
        closed.add(f"rows.{n}", n, in_lineage=True)
        closed.add(f"rows.{n}", n, in_lineage=True)
    assert closed.position() == {"below": 6, "above": [], "ids": [], "num_in_lineage": 6}
