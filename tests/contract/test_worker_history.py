"""The join run again over history: recorded clock events, or none."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from join_run import JoinRun, ids
from join_scripts import rew, scored, traj

from streamrft.schemas.events import now_ms
from streamrft.streams.settings import StreamSettings

LIVE = StreamSettings(grace_ms=50)
AGAIN = replace(LIVE, time="event")
NEVER = 10**9


@pytest.fixture
def run(log, place) -> JoinRun:
    return JoinRun(log, namespace=place.name("live"), engine=place.engine)


def copy(source: JoinRun, target: JoinRun, *topics: str) -> None:
    """The same records at the same offsets."""
    producer = source.log.producer()
    for topic in topics:
        for r in source.records(topic):
            producer.send(
                target.topics.name(topic),
                r.value,
                key=r.key,
                partition=r.partition,
                timestamp_ms=r.timestamp_ms,
            )
    producer.flush()


def results(run: JoinRun) -> tuple[Counter, Counter]:
    """Everything decided, without the time of writing."""
    experiences = Counter(
        (e.trajectory_id, e.reward, e.reward_revision, e.group_experiences, len(e.group))
        for e in run.experiences()
    )
    return experiences, Counter(
        (d.trajectory_id, d.reason, d.group_experiences) for d in run.drops()
    )


def test_a_run_over_recorded_clocks_closes_what_was_closed_live(run, log, place):
    rng = random.Random(1)
    for wave in range(2):
        names = [f"w{wave}.{g}" for g in range(8)]
        for name in names:
            deadline = rng.choice((200, 900, None))
            for slot in range(rng.choice((1, 2, 2))):
                t = traj(
                    f"{name}:{slot}:a",
                    size=2,
                    at=now_ms(),
                    reward_deadline_ms=deadline,
                    group_deadline_ms=600,
                )
                run.send(t)
                if rng.random() < 0.6:
                    run.send(rew(t.trajectory_id, rng.random(), at=now_ms()))
        before = run.counters().get("groups", 0)
        run.drive(lambda before=before: run.counters().get("groups", 0) >= before + 5, LIVE)
    assert run.counters()["groups"] >= 10
    again = JoinRun(log, namespace=place.name("again"), engine=place.engine)
    again.send_raw("clock", b"no clock", partition=0)
    copy(run, again, "trajectories", "rewards", "clock")
    num_clocks = again.num("clock")
    again.drive(lambda: again.counters().get("groups") == run.counters()["groups"], AGAIN)
    assert results(again) == results(run)
    assert again.num("clock") == num_clocks
    assert [letter.value for letter in again.dead_letters()] == [b"no clock"]
    assert again.counters()["open_groups"] == run.counters()["open_groups"]


def test_history_without_clocks_is_merged_by_event_time_and_its_end_closes_the_rest(run):
    run.send(
        traj("g1:0:a", at=1_000, reward_deadline_ms=100),
        traj("g2:0:a", at=1_000, reward_deadline_ms=100),
        traj("g3:0:a", size=2, at=5_000),
        scored("g3:1:a", 2.0, size=2, at=5_000),
    )
    run.send(rew("g1:0:a", 1.0, at=1_100), rew("g2:0:a", 1.0, at=1_101))
    run.drive(lambda: len(run.ends()) == 4, AGAIN)
    assert ids(run.experiences()) == ["g1:0:a", "g3:1:a"]
    assert Counter((d.trajectory_id, d.reason) for d in run.drops()) == Counter(
        [("g2:0:a", "expired"), ("g3:0:a", "expired")]
    )
    assert run.num("clock") == 0


def test_late_rewards_amend_the_group_for_replay_only(run):
    amending = replace(LIVE, late="amend")
    at = now_ms()
    members = [traj(f"g1:{slot}:a", size=2, at=at, reward_deadline_ms=300) for slot in (0, 1)]
    run.send(*members, rew("g1:0:a", 1.0, at=at))
    run.drive(lambda: len(run.ends()) == 2, amending)
    run.send(rew("g1:1:a", 3.0, at=now_ms()), rew("g1:0:a", 2.0, revision=1, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 1 + 2 + 2, amending)
    by_revision = {
        n: {e.trajectory_id: e.reward for e in run.experiences() if e.reward_revision == n}
        for n in range(3)
    }
    assert by_revision == {
        0: {"g1:0:a": 1.0},
        1: {"g1:0:a": 1.0, "g1:1:a": 3.0},
        2: {"g1:0:a": 2.0, "g1:1:a": 3.0},
    }
    assert [(d.trajectory_id, d.reason) for d in run.drops()] == [("g1:1:a", "expired")]
    assert run.counters()["amended"] == 2 == run.counters()["late"]
    assert run.counters()["experiences"] == 1
