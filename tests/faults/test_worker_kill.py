"""The join worker under kill -9 and SIGSTOP: every trajectory ends once, whatever dies."""

from __future__ import annotations

import random
import secrets
import signal
import time
from collections import Counter

import pytest
from join_reference import Step, Tick, reference
from join_run import JoinRun
from join_scripts import failed, result_of, rew, scored, traj
from waiting import until

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Limits, open_log
from streamrft.streams.settings import StreamSettings

SESSION_MS = 1_000
Event = ev.Trajectory | ev.Reward
SETTINGS: dict[str, int] = dict(batch_records=20, grace_ms=0)


slow = pytest.mark.slow
ON_KAFKA = ["sqlite", "kafka-faust", pytest.param("kafka-native", marks=slow)]
POINTS = ("join.before_commit", "join.committed")
AROUND = [
    *(("sqlite", point) for point in POINTS),
    ("kafka-faust", POINTS[0]),
    pytest.param("kafka-faust", POINTS[1], marks=slow),
    *(pytest.param("kafka-native", point, marks=slow) for point in POINTS),
]


@pytest.fixture
def shell(request):
    """The log and the shell of its workers."""
    return getattr(request, "param", "sqlite")


@pytest.fixture
def url(tmp_path, shell, request):
    if shell == "sqlite":
        return f"sqlite:///{tmp_path}/log.db"
    return request.getfixturevalue("kafka_url")


@pytest.fixture
def run(url, shell):
    log = open_log(url, Limits(session_timeout_ms=SESSION_MS))
    engine = "faust" if shell == "kafka-faust" else "native"
    yield JoinRun(log, namespace=f"kill-{secrets.token_hex(4)}", engine=engine)
    log.close()


def history(num_groups: int, seed: int = 0) -> list[Event]:
    """Groups of two: scored, judged from outside, failed, executed twice, sent twice."""
    rng, events = random.Random(seed), []
    for g in range(num_groups):
        for slot in range(2):
            name, at = f"g{seed}.{g}:{slot}:a", now_ms()
            kind = rng.choice(("scored", "judged", "failed"))
            if kind == "scored":
                events.append(scored(name, rng.random(), size=2, at=at))
            elif kind == "failed":
                events.append(failed(name, size=2, at=at))
            else:
                events.append(traj(name, size=2, at=at))
                events.append(rew(name, rng.random(), at=at))
            if rng.random() < 0.2:
                events.append(scored(f"{name}2", 9.0, size=2, at=at))
            if rng.random() < 0.2:
                events.append(events[-1])
    return events


def send(run: JoinRun, events: list[Event], chunk: int = 50) -> None:
    for i in range(0, len(events), chunk):
        run.send(*events[i : i + chunk])


def is_joined(run: JoinRun, events: list[Event]) -> bool:
    """Wait until all is read, as the state beside the ends says; whether they are right."""
    expected = reference(events, StreamSettings(**SETTINGS))
    num = Counter("rewards" if isinstance(e, ev.Reward) else "trajectories" for e in events)
    until(lambda: all(run.counters().get(name, 0) >= n for name, n in num.items()))
    found, counts = result_of(run.experiences(), run.drops()), run.counters()
    assert found.experiences == expected.experiences
    assert {name: counts[name] for name in num} == num
    assert counts["open_groups"] == counts["pending"] == 0
    return found.drops == expected.drops


@pytest.mark.parametrize("shell, point", AROUND, indirect=["shell"])
def test_a_worker_killed_around_its_commit_loses_and_doubles_nothing(url, run, tmp_path, point):
    events = history(60)
    send(run, events)
    marker = tmp_path / "killed"
    with run.spawn(url, settings=SETTINGS, kill_at=f"{point}={marker}") as worker:
        assert worker.wait() == -signal.SIGKILL
    assert marker.exists()
    with run.spawn(url, settings=SETTINGS):
        assert is_joined(run, events)


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_killed_at_random_times_lose_and_double_nothing(url, run, seed):
    rng, events = random.Random(seed), []
    for wave in range(5):
        more = history(40, seed=10 * seed + wave)
        events += more
        with run.spawn(url, settings=SETTINGS, name=f"join-{wave}"):
            send(run, more, chunk=10)
            time.sleep(rng.uniform(0.2, 0.8))
    with run.spawn(url, settings=SETTINGS, name="join-last"):
        assert is_joined(run, events)


@pytest.mark.parametrize("shell", ON_KAFKA, indirect=True)
def test_a_worker_paused_past_its_lease_publishes_nothing_when_it_wakes(url, run):
    events = history(40, seed=3)
    send(run, events)
    pause = "join.before_commit"
    with run.spawn(url, settings=SETTINGS, name="join-0", pause_at=pause) as first:
        until(lambda: first.is_paused)
        with run.spawn(url, settings=SETTINGS, name="join-1") as second:
            assert is_joined(run, events)
            first.send(signal.SIGCONT)
            more = history(40, seed=4)
            send(run, more)
            assert is_joined(run, events + more)
            for worker in (first, second):
                worker.send(signal.SIGTERM)
                assert worker.wait() == 0


def waiting(num_groups: int, seed: int) -> list[Event]:
    """Groups of two, judged in time, late or never; each closes by time at the latest."""
    rng, events = random.Random(seed), []
    for g in range(num_groups):
        for slot in range(2):
            name, at = f"w{seed}.{g}:{slot}:a", now_ms()
            if rng.random() < 0.15:
                continue
            deadlines = dict(reward_deadline_ms=rng.choice((300, 1_200)), group_deadline_ms=900)
            events.append(traj(name, size=2, at=at, **deadlines))
            if rng.random() < 0.7:
                events.append(rew(name, rng.random(), at=at + rng.choice((0, 300, 301))))
            if rng.random() < 0.1:
                events.append(rew(f"{name}-never", 1.0, at=at))
    rng.shuffle(events)
    return events


def as_read(run: JoinRun, partition: int) -> list[Step]:
    """What the log says one partition read: between two clock events the order does not matter."""
    rest = {
        topic: [
            (r.offset, codec.decode(r.value, kind))
            for r in run.records(topic)
            if r.partition == partition
        ]
        for topic, kind in (("trajectories", ev.Trajectory), ("rewards", ev.Reward))
    }
    steps: list[Step] = []
    clocks = [c for c in run.events("clock", ev.Clock) if c.partition == partition]
    for clock in clocks:
        for topic, end in clock.positions.items():
            steps += [event for offset, event in rest[topic] if offset < end]
            rest[topic] = [(offset, event) for offset, event in rest[topic] if offset >= end]
        steps.append(Tick(clock.time_ms))
    return steps + [event for topic in rest for _, event in rest[topic]]


@pytest.mark.parametrize("shell", ON_KAFKA, indirect=True)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=slow)])
def test_deadlines_of_killed_workers_close_as_the_recorded_clocks_say(url, run, seed):
    rng = random.Random(seed)
    for wave in range(4):
        with run.spawn(url, settings=SETTINGS, name=f"join-{wave}"):
            for _ in range(4):
                send(run, waiting(5, seed=rng.randrange(10**6)))
                time.sleep(rng.uniform(0.0, 0.3))
    with run.spawn(url, settings=SETTINGS, name="join-last"):
        num = run.num("trajectories")
        until(lambda: run.counters().get("trajectories") == num)
        until(lambda: run.counters()["open_groups"] == 0)
    found = result_of(run.experiences(), run.drops())
    expected = [reference(as_read(run, p), StreamSettings(**SETTINGS)) for p in range(4)]
    assert found.experiences == {k: v for e in expected for k, v in e.experiences.items()}
    assert found.drops == sum((e.drops for e in expected), Counter())
    # late: of a slot that came alone, on a machine that stood still until its group was closed
    assert {"expired"} <= {reason for _, reason, _ in found.drops} <= {"expired", "late"}
    assert len(found.experiences) > 20


def test_two_workers_share_the_partitions_and_one_may_leave(url, run):
    events = history(100, seed=6)
    with (
        run.spawn(url, settings=SETTINGS, name="join-0") as first,
        run.spawn(url, settings=SETTINGS, name="join-1"),
    ):
        send(run, events, chunk=10)
        until(lambda: readers(run) == {"join-0", "join-1"})
        first.send(signal.SIGTERM)
        assert first.wait() == 0
        more = history(40, seed=7)
        send(run, more)
        assert is_joined(run, events + more)


def readers(run: JoinRun) -> set[str]:
    """Workers that said they hold partitions."""
    beats = run.events("heartbeats", ev.Heartbeat)
    return {b.process for b in beats if b.metrics.get("partitions")}
