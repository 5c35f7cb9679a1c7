"""The ledger: every trajectory in exactly one state, and one missing record never goes unseen."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.deploy.views.ledger import Balance, Books, Ledger, Pending
from streamrft.schemas import events as ev
from streamrft.streams.lineage import Lineage
from streamrft.streams.log import Position

MAIN = Lineage.of("main", [])


@dataclass
class Story:
    """Records of one partition as (topic, event) in the order in which they were written."""

    records: list[tuple[str, object]] = field(default_factory=list)
    joined: int | None = None
    in_state: set[str] = field(default_factory=set)
    finished: int = 0

    def trajectory(self, name: str) -> Story:
        self.records.append(("trajectories", name))
        return self

    def experience(self, name: str, revision: int = 0) -> Story:
        self.records.append(("experiences", experience(name, revision)))
        return self

    def drop(self, name: str, reason: str, where: str = "join", branch: str = "", step: int = -1):
        self.records.append(("drops", drop(name, reason, where, branch, step)))
        return self

    def cut(self, step: int, *names: str, branch: str = "main") -> Story:
        self.records.append(("train_steps", cut(step, names, branch)))
        return self

    def trained(self, step: int, *names: str) -> Story:
        for name in names:
            self.trajectory(name).experience(name)
        return self.cut(step, *names)

    def fold(self, lineage: Lineage = MAIN, books: Books | None = None) -> Ledger:
        ledger = Ledger(lineage, books)
        feed(ledger, self.records)
        return ledger

    def balance(self, lineage: Lineage = MAIN, first_kept: int = 0) -> Balance:
        return self.judge(self.fold(lineage), first_kept)

    def judge(self, ledger: Ledger, first_kept: int = 0) -> Balance:
        num = sum(topic == "trajectories" for topic, _ in self.records)
        joined = num if self.joined is None else self.joined
        return ledger.balance(
            {0: joined}, self.in_state, {0: first_kept}, {"applied": 3}, {0: self.finished}
        )


def feed(ledger: Ledger, records: list[tuple[str, object]]) -> None:
    offset = num_experiences = 0
    for topic, event in records:
        if topic == "trajectories":
            ledger.on_trajectory(str(event), Position("p.n.trajectories", 0, offset))
            offset += 1
        elif isinstance(event, ev.Experience):
            ledger.on_experience(event, num_experiences)
            num_experiences += 1
        elif isinstance(event, ev.Drop):
            ledger.on_drop(event)
        elif isinstance(event, ev.Cut):
            ledger.on_cut(event)


def experience(name: str, revision: int = 0) -> ev.Experience:
    return ev.Experience(
        trajectory_id=name, reward_revision=revision, group_id=ev.group_of(name), slot=0, number=0,
        branch="main", min_policy_version=0, max_policy_version=0, num_tokens=1,
        num_trained_tokens=1, reward=1.0, reward_parts={}, group=[], group_experiences=1,
        trajectory=b"", trajectory_partition=0, trajectory_offset=0, produced_at=0,
    )  # fmt: skip


def drop(name: str, reason: str, where: str, branch: str, step: int) -> ev.Drop:
    assert reason in ev.DROP_REASONS
    return ev.Drop(
        trajectory_id=name, group_id=ev.group_of(name), slot=0, number=0,
        reason=reason,  # type: ignore[arg-type]
        detail="", where=where, branch=branch, step=step, produced_at=0,
    )  # fmt: skip


def cut(step: int, names: tuple[str, ...], branch: str) -> ev.Cut:
    members = [
        ev.CutMember(trajectory_id=n, reward_revision=0, partition=0, offset=0) for n in names
    ]
    return ev.Cut(branch=branch, step=step, members=members, parent="", epoch=1, produced_at=0)


def every_state() -> Story:
    """Two trained, one of each drop, one pending in each place."""
    story = Story().trained(1, "g.0:0:a", "g.0:1:a")
    for i, reason in enumerate(("filtered", "expired", "late", "superseded", "failed", "invalid")):
        story.trajectory(f"g.1:{i}:a").drop(f"g.1:{i}:a", reason)
    story.trajectory("g.2:0:a").experience("g.2:0:a").drop("g.2:0:a", "stale", "trainer", "main", 1)
    story.trajectory("g.3:0:a").experience("g.3:0:a")
    story.trajectory("g.4:0:a").trajectory("g.5:0:a")
    story.in_state, story.joined, story.finished = {"g.4:0:a"}, 11, 3
    return story


def test_every_state_is_counted_by_itself() -> None:
    found = every_state().balance()
    assert found.faults == ()
    assert found.is_balanced
    assert found.produced == 12
    assert {k: n for k, n in found.states.items() if n} == {
        "trained": 2, "filtered": 1, "expired": 1, "late": 1, "superseded": 1, "failed": 1,
        "invalid": 1, "stale": 1,
    }  # fmt: skip
    assert found.pending == Pending(unjoined=1, open=1, ready=1)
    assert found.reward_counts == {"applied": 3}


REMOVALS: list[tuple[str, Callable[[object], bool]]] = [
    ("experiences", lambda e: isinstance(e, ev.Experience)),
    ("drops", lambda e: isinstance(e, ev.Drop)),
    ("trajectories", lambda e: True),
]


@pytest.mark.parametrize(("topic", "is_it"), REMOVALS, ids=[t for t, _ in REMOVALS])
def test_any_one_missing_record_is_named(topic: str, is_it: Callable[[object], bool]) -> None:
    whole = every_state()
    at = [i for i, (t, e) in enumerate(whole.records) if t == topic and is_it(e)]
    # trajectories that are only read, or refused as unreadable, leave no other trace
    silent = {"g.4:0:a", "g.5:0:a", "g.1:5:a"}
    for i in at:
        event = whole.records[i][1]
        name = getattr(event, "trajectory_id", event)
        if topic == "trajectories" and name in silent:
            continue
        damaged = Story(
            whole.records[:i] + whole.records[i + 1 :], whole.joined, whole.in_state, whole.finished
        )
        if topic == "trajectories":
            damaged.joined = 10
        found = damaged.balance()
        assert not found.is_balanced, name
        assert any(str(name) in fault for fault in found.faults), (name, found.faults)


@given(st.permutations(every_state().records), st.integers(0, 20))
def test_the_order_of_reading_and_a_pause_change_nothing(
    records: list[tuple[str, object]], pause_at: int
) -> None:
    story = every_state()
    # within a topic the order is the log's; between topics it is the reader's
    topics = {topic for topic, _ in story.records}
    queues = {topic: iter([r for r in story.records if r[0] == topic]) for topic in topics}
    ordered = [next(queues[topic]) for topic, _ in records]
    first = Ledger(MAIN)
    offset = num_experiences = 0
    for i, record in enumerate(ordered):
        if i == pause_at:
            first = Ledger(
                MAIN, msgspec.msgpack.decode(msgspec.msgpack.encode(first.books), type=Books)
            )
        if record[0] == "trajectories":
            first.on_trajectory(str(record[1]), Position("p.n.trajectories", 0, offset))
            offset += 1
        elif isinstance(record[1], ev.Experience):
            first.on_experience(record[1], num_experiences)
            num_experiences += 1
        else:
            feed(first, [record])
    assert story.judge(first) == story.balance()


def test_records_read_twice_are_repeats() -> None:
    story = every_state()
    doubled = Story([r for r in story.records for _ in (0, 1) if r[0] != "trajectories"], 0)
    ledger = story.fold()
    feed(ledger, doubled.records)
    found = story.judge(ledger)
    assert found.is_balanced and found.produced == 12
    assert found.num_repeats > 0


@dataclass(frozen=True)
class Wrong:
    story: Story
    expected: str


@pytest.mark.parametrize(
    "case",
    [
        Wrong(
            Story().trained(1, "g.0:0:a").cut(2, "g.0:0:a"), "trained and then trained by main/2"
        ),
        Wrong(
            Story().trained(1, "g.0:0:a").drop("g.0:0:a", "stale", "trainer", "main", 1),
            "trained and then stale by trainer",
        ),
        Wrong(
            Story().trajectory("g.0:0:a").drop("g.0:0:a", "failed").drop("g.0:0:a", "expired"),
            "failed and then expired",
        ),
        Wrong(
            Story().trajectory("g.0:0:a").experience("g.0:0:a").drop("g.0:0:a", "filtered"),
            "filtered by join, but it is an experience too",
        ),
        Wrong(Story().trajectory("g.0:0:a").cut(1, "g.0:0:a"), "it never was an experience"),
        Wrong(Story().experience("g.0:0:a"), "an experience, but no such trajectory"),
        Wrong(Story().drop("g.0:0:a", "failed"), "failed by join, but no such trajectory"),
        Wrong(Story().trajectory("g.0:0:a"), r"lost: read by the join \(trajectories\[0\]@0\)"),
    ],
    ids=lambda c: c.expected[:30],
)
def test_what_is_wrong_is_named(case: Wrong) -> None:
    found = case.story.balance()
    assert not found.is_balanced
    (fault,) = found.faults
    assert fault.startswith("g.0:0:a: ")
    assert re.search(case.expected, fault), fault


def test_an_amendment_changes_no_state() -> None:
    found = Story().trained(1, "g.0:0:a").experience("g.0:0:a", revision=1).balance()
    assert found.is_balanced
    assert (found.num_amended, found.states["trained"]) == (1, 1)


def test_a_refused_record_that_nobody_can_read_counts_by_its_drop() -> None:
    found = Story().trained(1, "g.0:0:a").drop("g.0:1:a", "invalid").balance()
    assert found.is_balanced
    assert (found.produced, found.states["invalid"]) == (2, 1)


def test_a_dead_letter_that_is_read_before_its_record_tells_of_it() -> None:
    ledger = Ledger(MAIN)
    ledger.on_dead_letter(letter_of(7), of_trajectories=True)
    ledger.on_unreadable(Position("p.n.trajectories", 0, 7))
    assert ledger.balance({0: 8}, (), {}, {}, {}).is_balanced
    ledger.on_unreadable(Position("p.n.trajectories", 1, 7))
    assert not ledger.balance({0: 8, 1: 8}, (), {}, {}, {}).is_balanced


def test_a_record_that_can_be_read_by_now_is_a_dead_letter_until_its_replay() -> None:
    ledger = Ledger(MAIN)
    ledger.on_dead_letter(letter_of(7), of_trajectories=True)
    ledger.on_trajectory("g.0:0:a", Position("p.n.trajectories", 0, 7))
    found = ledger.balance({0: 8}, (), {}, {}, {})
    assert found.is_balanced and found.produced == 0
    ledger.on_trajectory("g.0:0:a", Position("p.n.trajectories", 0, 9))
    assert ledger.balance({0: 8}, (), {}, {}, {}).pending.unjoined == 1
    assert ledger.balance({0: 10}, {"g.0:0:a"}, {}, {}, {}).pending.open == 1
    (fault,) = ledger.balance({0: 10}, (), {}, {}, {}).faults
    assert fault == "g.0:0:a: lost: read by the join (trajectories[0]@9), no end"


def letter_of(offset: int) -> ev.DeadLetter:
    return ev.DeadLetter(
        topic="p.n.trajectories", partition=0, offset=offset, key=None, value=None, headers={},
        error="", reader="join-0", produced_at=0,
    )  # fmt: skip


def test_an_unreadable_record_needs_a_dead_letter() -> None:
    ledger = Ledger(MAIN)
    ledger.on_unreadable(Position("p.n.trajectories", 0, 7))
    assert ledger.balance({0: 7}, (), {}, {}, {}).is_balanced, "the join has not read it yet"
    found = ledger.balance({0: 8}, (), {}, {}, {})
    assert found.faults == ("trajectories[0]@7: no event and no dead letter",)
    ledger.on_dead_letter(letter_of(7), of_trajectories=True)
    assert ledger.balance({0: 8}, (), {}, {}, {}).is_balanced
    assert ledger.balance({0: 8}, (), {}, {}, {}).num_dead_letters == 1


def test_what_retention_deleted_is_no_fault() -> None:
    story = Story().experience("g.0:0:a").cut(1, "g.0:0:a").trained(2, "g.1:0:a")
    assert not story.balance().is_balanced
    assert story.balance(first_kept=5).is_balanced


def missing(*topics: str) -> Balance:
    """One trajectory each: trained, stale, filtered, and one whose end nothing tells."""
    story = Story().trajectory("g.0:0:a").trajectory("g.1:0:a").trajectory("g.2:0:a")
    story.trajectory("g.3:0:a").cut(1, "g.0:0:a").drop("g.1:0:a", "stale", "trainer", "main", 1)
    ledger = story.drop("g.2:0:a", "filtered").fold()
    for topic in topics:
        ledger.on_missed(topic, 0)
    return story.judge(ledger)


def test_experiences_that_retention_deleted_unread_are_missed_only_where_they_were_not_ended():
    assert len(missing().faults) == 3
    found = missing("experiences")
    assert found.faults == (
        "g.3:0:a: its experience was deleted by retention before it was trained on",
    )
    assert {k: n for k, n in found.states.items() if n} == {"trained": 1, "stale": 1, "filtered": 1}


@pytest.mark.parametrize("topic", ["drops", "train_steps"])
def test_an_end_that_retention_deleted_unread_is_counted_by_itself(topic: str) -> None:
    found = missing("experiences", topic)
    assert (found.is_balanced, found.num_forgotten, found.produced) == (True, 1, 4)


# --- branches

FORK = Lineage.of("b", [ev.Branch(branch="b", parent="main", step=2, produced_at=0)])


def forked() -> Story:
    """Steps 1 to 3 on main, then a fork at 2 that drops what step 3 had trained."""
    story = Story().trained(1, "g.0:0:a").trained(2, "g.1:0:a").trained(3, "g.2:0:a")
    story.trajectory("g.3:0:a").experience("g.3:0:a")
    story.drop("g.3:0:a", "stale", "trainer", "main", 3)
    return story


def test_an_abandoned_branch_does_not_count_after_its_fork() -> None:
    assert forked().balance().states["trained"] == 3
    found = forked().balance(FORK)
    assert found.is_balanced
    assert (found.states["trained"], found.states["stale"], found.pending.ready) == (2, 0, 2)


def test_the_new_branch_judges_again() -> None:
    story = forked().drop("g.2:0:a", "off_lineage", "trainer", "b", 2).cut(3, "g.3:0:a", branch="b")
    found = story.balance(FORK)
    assert found.is_balanced
    assert (found.states["trained"], found.states["off_lineage"]) == (3, 1)


@pytest.mark.parametrize("again", [False, True])
def test_a_drop_at_the_step_of_the_fork_may_be_decided_again(again: bool) -> None:
    story = Story().trained(1, "g.0:0:a").trained(2, "g.1:0:a")
    story.trajectory("g.2:0:a").experience("g.2:0:a")
    story.drop("g.2:0:a", "stale", "trainer", "main", 2)
    if again:
        story.drop("g.2:0:a", "off_lineage", "trainer", "b", 2)
    found = story.balance(FORK)
    assert found.is_balanced
    assert found.states["off_lineage" if again else "stale"] == 1
    assert sum(found.states.values()) == 3


def test_books_of_another_branch_are_not_gone_on_with() -> None:
    with pytest.raises(AssertionError, match="counted anew"):
        Ledger(FORK, Story().trained(1, "g.0:0:a").fold().books)
