"""The join, fact by fact."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from join_reference import Tick
from join_scripts import HORIZON_MS, SETTINGS, Runner, failed, rew, scored, sequence, traj

from streamrft.schemas import events as ev
from streamrft.schemas.errors import InvalidEvent
from streamrft.schemas.topics import partition_for
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.join.outcomes import Misaddressed
from streamrft.streams.log import Position

AMEND = replace(SETTINGS, late="amend")


@pytest.fixture
def runner() -> Runner:
    return Runner()


def rewards(runner: Runner) -> dict[str, float]:
    return {e.trajectory_id: e.reward for e in runner.experiences}


def drops(runner: Runner) -> list[tuple[str, str, int | None]]:
    return [(d.trajectory_id, d.reason, d.group_experiences) for d in runner.drops]


def test_join_waits_for_every_source_of_every_member(runner):
    both = {"judge": 1.0, "style": 0.5}
    runner.feed(*[traj(f"g:{i}:a", size=2, reward_sources=both) for i in range(2)])
    runner.feed(rew("g:0:a", 1.0), rew("g:1:a", 2.0), rew("g:0:a", 4.0, source="style"))
    assert not runner.experiences
    runner.feed(rew("g:1:a", 8.0, source="style"))
    assert rewards(runner) == {"g:0:a": 3.0, "g:1:a": 6.0}
    assert runner.experiences[0].reward_parts == {"judge": 1.0, "style": 4.0}


def test_a_reward_before_its_trajectory_is_kept(runner):
    runner.feed(rew(value=0.5), traj())
    assert rewards(runner) == {"g:0:a": 0.5}


def test_a_repeated_reward_counts_once_before_and_after_the_close(runner):
    runner.feed(traj(size=2), rew(), rew(), scored("g:1:a", 0.0, size=2), rew())
    assert runner.join.counts["applied"] == 1
    assert runner.join.counts["duplicate"] == 2


def test_a_higher_revision_replaces_before_the_close_whatever_the_order(runner):
    first, second = rew(value=1.0), rew(value=2.0, revision=1)
    runner.feed(traj(size=2), second, first, scored("g:1:a", 0.0, size=2))
    other = Runner()
    other.feed(traj(size=2), first, second, scored("g:1:a", 0.0, size=2))
    assert rewards(runner) == rewards(other) == {"g:0:a": 2.0, "g:1:a": 0.0}
    assert runner.join.counts == other.join.counts


def test_a_correction_after_the_close_is_late_and_ignored(runner):
    runner.feed(traj(), rew(value=1.0), rew(value=2.0, revision=1))
    assert rewards(runner) == {"g:0:a": 1.0}
    assert runner.join.counts["late"] == 1


def test_a_correction_after_the_close_amends_the_whole_group():
    runner = Runner(AMEND)
    runner.feed(scored("g:1:a", 5.0, size=2), traj(size=2), rew(value=1.0))
    (closed,) = runner.feed(rew(value=2.0, revision=1))
    assert (closed.revision, closed.drops) == (1, [])
    assert {m.slot: m.reward for m in closed.members} == {0: 2.0, 1: 5.0}
    assert runner.feed(rew(value=3.0, revision=1)) == []
    assert runner.join.gauges()["open_groups"] == 0


def test_an_amended_group_survives_a_restart():
    runner = Runner(AMEND)
    runner.feed(traj(), rew(value=1.0))
    runner.crash()
    (closed,) = runner.feed(rew(value=2.0, revision=1))
    assert (closed.revision, closed.members[0].reward) == (1, 2.0)


def test_a_late_reward_read_before_the_close_amends_after_it():
    runner = Runner(AMEND)
    runner.feed(traj(reward_deadline_ms=50, size=2), scored("g:1:a", 5.0, size=2))
    runner.feed(rew(value=2.0, at=51))
    runner.crash()
    first, again = runner.feed(Tick(60))
    assert [m.slot for m in first.members] == [1]
    assert [(m.slot, m.reward) for m in again.members] == [(0, 2.0), (1, 5.0)]


def test_the_first_trajectory_holds_the_slot_and_keeps_its_rewards(runner):
    runner.feed(rew("g:0:b", 9.0), traj("g:0:a"), traj("g:0:b"), rew("g:0:b", 9.0, source="other"))
    runner.feed(rew("g:0:a", 1.0), traj("g:0:c"))
    assert rewards(runner) == {"g:0:a": 1.0}
    assert drops(runner) == [("g:0:b", "superseded", None), ("g:0:c", "superseded", None)]
    assert runner.join.counts["superseded"] == 2


def test_a_redelivered_trajectory_is_a_repeat_whatever_became_of_it(runner):
    for _ in range(3):
        runner.feed(traj("g:0:a"), traj("g:0:b"), failed("h:0:a", size=2), rew("g:0:a"))
    assert len(runner.experiences) == 1
    assert drops(runner) == [("g:0:b", "superseded", None)]
    assert runner.join.counts["repeats"] == 6


def test_a_failed_member_closes_its_slot_at_once(runner):
    runner.feed(scored("g:0:a", 1.0, size=2), failed("g:1:a", size=2))
    assert runner.experiences[0].group_experiences == 1
    assert drops(runner) == [("g:1:a", "failed", None)]


def test_a_group_that_only_failed_says_so_at_its_close(runner):
    runner.feed(*[failed(f"g:{i}:a", size=3) for i in range(2)])
    assert drops(runner) == [("g:0:a", "failed", None)]
    assert runner.join.gauges()["pending"] == 1
    runner.feed(failed("g:2:a", size=3))
    assert drops(runner)[1:] == [("g:1:a", "failed", None), ("g:2:a", "failed", 0)]


def test_a_failed_member_and_an_empty_slot_say_so_at_the_group_deadline(runner):
    runner.feed(failed("g:0:a", size=2, group_deadline_ms=100))
    assert drops(runner) == []
    runner.feed(Tick(109))
    assert drops(runner) == []
    runner.feed(Tick(110))
    assert drops(runner) == [("g:0:a", "failed", 0)]


def test_an_unfilled_slot_without_group_deadline_waits_for_ever(runner):
    runner.feed(traj(size=2, reward_deadline_ms=10), Tick(10**9))
    assert runner.join.gauges()["open_groups"] == 1
    assert not runner.join.has_open_deadline


def test_a_reward_at_the_deadline_counts_and_one_after_it_is_late(runner):
    runner.feed(traj("g:0:a", reward_deadline_ms=50), rew("g:0:a", at=50))
    runner.feed(traj("h:0:a", reward_deadline_ms=50), rew("h:0:a", at=51), Tick(60))
    assert rewards(runner) == {"g:0:a": 1.0}
    assert drops(runner) == [("h:0:a", "expired", 0)]
    assert runner.join.counts["late"] == 1


def test_an_honest_reward_counts_until_the_clock_passes_deadline_and_grace(runner):
    runner.feed(traj(reward_deadline_ms=50), Tick(59), rew(at=50))
    assert rewards(runner) == {"g:0:a": 1.0}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (dict(on_deadline="partial"), {"g:0:a": 1.0}),
        (dict(on_deadline="partial", min_group_size=2), {}),
        (dict(on_deadline="default", default_reward=-1.0), {"g:0:a": 1.0, "g:1:a": -0.5}),
        (dict(on_deadline="drop"), {}),
    ],
)
def test_the_deadline_policy_decides_a_group_scored_in_part(policy, expected):
    runner = Runner(replace(SETTINGS, **policy))
    members = [traj(f"g:{i}:a", size=2, reward_deadline_ms=50) for i in range(2)]
    half = msgspec.structs.replace(members[1], reward_sources={"judge": 0.5})
    runner.feed(members[0], half, rew("g:0:a"), Tick(60))
    assert rewards(runner) == expected
    missing = {"g:0:a", "g:1:a"} - set(expected)
    assert {d.trajectory_id for d in runner.drops} == missing
    assert all(d.reason == "expired" for d in runner.drops)
    assert all(d.group_experiences == len(expected) for d in runner.drops)


def test_rewards_of_unknown_sources_and_failed_members_are_refused(runner):
    runner.feed(rew(source="typo"), traj(size=2), failed("g:1:a", size=2), rew("g:1:a"))
    assert runner.join.counts["refused"] == 2


def test_a_span_outside_the_tokens_is_refused(runner):
    outside = ev.Span(sequence=0, start=1, end=99)
    runner.feed(traj(sequences=[sequence(4)]), rew(span=outside))
    assert not runner.experiences
    assert runner.join.counts["refused"] == 1


def test_scores_of_one_source_in_the_record_add_up(runner):
    steps = [
        ev.Score(source="judge", value=v, span=ev.Span(sequence=0, start=s, end=s + 1))
        for s, v in ((1, 0.25), (3, 0.5))
    ]
    runner.feed(traj(scores=steps))
    assert runner.experiences[0].reward == 0.75


def test_a_closed_group_drops_late_comers_until_it_is_forgotten(runner):
    runner.feed(scored("g:0:a", 1.0, size=2, group_deadline_ms=10), Tick(20))
    runner.feed(scored("g:1:a", 1.0, size=2, at=15))
    assert drops(runner)[-1] == ("g:1:a", "late", None)
    runner.feed(Tick(20 + HORIZON_MS))
    assert not runner.join.groups
    runner.feed(scored("g:1:b", 1.0, size=2, at=20))
    assert drops(runner)[-1] == ("g:1:b", "late", None)


def test_a_trajectory_older_than_the_horizon_opens_nothing_and_is_dropped_once(runner):
    runner.feed(Tick(5_000), *[scored("g:0:a", 1.0, at=5_000 - HORIZON_MS)] * 2)
    assert drops(runner) == [("g:0:a", "late", None)]
    assert runner.join.gauges()["open_groups"] == 0


def test_orphans_are_forgotten_after_the_horizon(runner):
    runner.feed(rew(at=100), Tick(99 + HORIZON_MS))
    assert runner.join.gauges()["early"] == 1
    runner.feed(Tick(100 + HORIZON_MS))
    assert runner.join.counts["orphan"] == 1
    assert runner.join.take_changes() == {"g": None}


def test_a_reward_on_the_wrong_partition_comes_back_to_be_sent_on():
    home = partition_for(b"g", 4)
    join = RewardJoin(SETTINGS, partition=(home + 1) % 4, num_partitions=4)
    assert join.on_reward(rew()) == [Misaddressed(rew(), "g")]
    assert join.counts["forwarded"] == 1
    with pytest.raises(InvalidEvent, match=f"its group on {home}"):
        join.on_trajectory(traj(), Position("trajectories", (home + 1) % 4, 0))
    assert not join.groups


def test_a_group_size_that_disagrees_is_refused(runner):
    runner.feed(traj(size=2))
    with pytest.raises(InvalidEvent, match="opened with 2"):
        runner.feed(traj("g:1:a", size=3))


def test_a_refused_record_fills_its_slot_from_the_next_clock_on(runner):
    runner.feed(scored("g:0:a", 1.0, size=2))
    runner.join.on_invalid("g:1:a", time_ms=100, group_size=2, detail="bad mask")
    assert runner.join.gauges()["open_groups"] == 1
    runner.feed(Tick(110))
    assert runner.experiences[0].group_experiences == 1


def test_a_valid_attempt_takes_the_slot_of_a_refused_one(runner):
    runner.feed(scored("g:0:a", 1.0, size=2))
    runner.join.on_invalid("g:1:a", time_ms=100, group_size=2)
    runner.feed(rew("g:1:b", 3.0), traj("g:1:b", size=2), traj("g:1:a", size=2))
    assert rewards(runner) == {"g:0:a": 1.0, "g:1:b": 3.0}
    assert runner.join.counts["repeats"] == 1


@pytest.mark.parametrize("name", ["g", "g:a", "g:x:a", "g:-1:a", "g:01:a", "g:\u0661:a"])
def test_a_trajectory_id_without_a_slot_number_is_refused(runner, name):
    with pytest.raises(InvalidEvent, match="slot number"):
        runner.feed(rew(name))


def test_time_never_goes_back(runner):
    runner.feed(traj(reward_deadline_ms=50), Tick(60), Tick(10))
    assert runner.join.time_ms == 60
    assert runner.feed(Tick(60)) == []


def test_a_history_without_clocks_ends_by_closing_what_is_open(runner):
    runner.feed(traj(size=2), scored("g:1:a", 1.0, size=2))
    (closed,) = runner.join.close_all()
    assert [m.slot for m in closed.members] == [1]
    assert [d.reason for d in closed.drops] == ["expired"]
    assert runner.join.gauges()["open_groups"] == 0


def test_one_producer_cannot_flood_the_state_of_a_group(runner, monkeypatch):
    monkeypatch.setattr("streamrft.streams.join.rewards.MAX_EARLY", 3)
    runner.feed(*[rew(source=f"s{i}") for i in range(5)])
    assert runner.join.gauges()["early"] == 3
    assert runner.join.counts["refused"] == 2
