"""The join against a batch reference: any order, repetition, delay and crash point."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from join_reference import Tick, reference
from join_scripts import SETTINGS, random_events, run, scripts, settings, with_ticks

from streamrft.schemas import events as ev
from streamrft.schemas.errors import InvalidEvent
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.join.rewards import RewardBook
from streamrft.streams.join.state import Standing

THOROUGH = hypothesis_settings(max_examples=300)


@THOROUGH
@given(script=scripts(), policy=settings())
def test_join_gives_what_the_reference_gives_for_any_order(script, policy):
    assert run(script, policy).result() == reference(script, policy)


@THOROUGH
@given(script=scripts(), policy=settings(), data=st.data())
def test_a_crash_anywhere_changes_nothing(script, policy, data):
    crashes = data.draw(st.sets(st.integers(0, len(script) - 1), max_size=5))
    assert run(script, policy, crashes=crashes).result() == reference(script, policy)


@THOROUGH
@given(script=scripts(corrections=False), policy=settings(), rng=st.randoms())
def test_between_two_clock_events_the_interleaving_of_the_topics_changes_nothing(
    script, policy, rng
):
    once, again = run(script, policy).result(), run(interleaved(script, rng), policy).result()
    assert (once.experiences, once.drops) == (again.experiences, again.drops)


@THOROUGH
@given(script=scripts(), policy=settings())
def test_every_trajectory_and_every_reward_has_one_end_or_is_pending(script, policy):
    patient = replace(policy, late_horizon_ms=10**9)  # nothing is forgotten, no id comes again
    runner = run(script, patient)
    ends = [e.trajectory_id for e in runner.experiences] + [d.trajectory_id for d in runner.drops]
    read = {step.trajectory_id for step in script if isinstance(step, ev.Trajectory)}
    assert len(ends) == len(set(ends))
    assert len(read) == len(ends) + runner.join.gauges()["pending"]
    num_rewards = sum(isinstance(step, ev.Reward) for step in script)
    assert sum(runner.result().counts.values()) == num_rewards == runner.join.counts["rewards"]


@THOROUGH
@given(script=scripts(), policy=settings())
def test_a_group_that_closes_empty_says_so_in_a_drop(script, policy):
    runner = run(script, replace(policy, late_horizon_ms=10**9))
    told = {d.group_id for d in runner.drops if d.group_experiences == 0}
    trained = {e.group_id for e in runner.experiences}
    closed = {g.group_id for g in runner.join.groups.values() if g.is_closed}
    assert closed == told | trained
    assert not told & trained


def interleaved(script, rng: random.Random):
    """The same script with another merge of trajectories and rewards between each two ticks."""
    steps, segment = [], []
    for step in [*script, None]:
        if step is not None and not isinstance(step, Tick):
            segment.append(step)
            continue
        trajectories = [s for s in segment if isinstance(s, ev.Trajectory)]
        rewards = [s for s in segment if isinstance(s, ev.Reward)]
        while trajectories or rewards:
            source = (
                trajectories if not rewards or (trajectories and rng.random() < 0.5) else rewards
            )
            steps.append(source.pop(0))
        segment = []
        if step is not None:
            steps.append(step)
    return steps


class LastWins(RewardBook):
    """Wrong: a repeated revision replaces the first."""

    def apply(self, group, slot, source, standing):
        member = group.members[slot]
        held = member.standing(source) if source in member.sources else None
        if held is not None and held.revision == standing.revision:
            member.stand(source, standing)
        super().apply(group, slot, source, standing)


class DeadlineBlind(RewardBook):
    """Wrong: a reward counts whenever its event lies."""

    def apply(self, group, slot, source, standing):
        super().apply(group, slot, source, replace_time(standing, group.members[slot].time_ms))


class Forgetful(RewardBook):
    """Wrong: rewards before their trajectory are lost."""

    def keep_early(self, group, reward, standing, keep_until_ms):
        self.counts["orphan"] += 1


def with_book(book: type[RewardBook]):
    def make(policy):
        join = RewardJoin(policy)
        wrong = book(keeps_late=False)
        wrong.counts, join._book = join.counts, wrong
        return join

    return make


class Hasty(RewardJoin):
    """Wrong: closes at the deadline itself, without the grace."""

    def on_time(self, now_ms):
        return super().on_time(now_ms + self.settings.grace_ms)


class LateComersWin(RewardJoin):
    """Wrong: the newest attempt takes a slot."""

    def on_trajectory(self, trajectory, at):
        group = self.groups.get(trajectory.group_id)
        if group and group.is_open and trajectory.slot in group.members:
            group.members[trajectory.slot].state = 2
            group.num_waiting += 1
        return super().on_trajectory(trajectory, at)


class Impatient(RewardJoin):
    """Wrong: an unfilled slot holds nothing open."""

    def _touch(self, group):
        group.size = min(group.size, max(1, len(group.members)))
        super()._touch(group)


WRONG = {
    "last wins": with_book(LastWins),
    "deadline blind": with_book(DeadlineBlind),
    "forgetful": with_book(Forgetful),
    "hasty": Hasty,
    "late comers win": LateComersWin,
    "impatient": Impatient,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_reference_catches_a_wrong_join(name):
    policy = replace(SETTINGS, grace_ms=100)
    for seed in range(300):
        rng = random.Random(seed)
        events = random_events(rng)
        rng.shuffle(events)
        script = with_ticks(rng, events)
        expected = reference(script, policy)
        assert run(script, policy).result() == expected
        if differs(script, policy, WRONG[name], expected):
            return
    raise AssertionError(f"300 scripts did not tell the join that is wrong by {name!r}")


def differs(script, policy, make, expected) -> bool:
    """Whether a wrong join is told by what it gives, or by breaking an invariant of its own."""
    try:
        return run(script, policy, make=make).result() != expected
    except (AssertionError, InvalidEvent, KeyError):
        return True


def replace_time(standing, time_ms):
    return Standing(standing.value, time_ms, standing.revision, standing.event_id, standing.spans)
