"""The scheduler over a real log: transactions, leases, forks and the end of a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from topic_events import append_events, events_on
from waiting import until

from streamrft.producers.scheduler import Scheduler, run_scheduler
from streamrft.producers.settings import Pacing, SchedulerSettings, TasksetSettings
from streamrft.producers.tasksets import Tasksets
from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import Fenced
from streamrft.schemas.topics import Topics
from streamrft.streams.log import Log, Partition, open_log, topic_specs
from streamrft.streams.process import Process
from streamrft.streams.reading import read_to_end

TOPICS = Topics("p.run")
E = TypeVar("E", bound=ev.Event)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/log.db"
    log = open_log(url)
    log.ensure_topics(topic_specs(TOPICS))
    log.close()
    return url


@pytest.fixture
def log(url) -> Iterator[Log]:
    log = open_log(url)
    yield log
    log.close()


def settings(tmp_path: Path, **fields) -> SchedulerSettings:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(6)))
    return SchedulerSettings(
        **{
            "tasksets": (TasksetSettings(name="t", path=str(rows), workflow="w"),),
            "batch_size": 2,
            "group_size": 2,
            "pacing": Pacing(),
            "total_epochs": 1,
            "lease_ms": 2_000,
            **fields,
        }
    )


def read(log: Log, topic: str, kind: type[E]) -> list[E]:
    return events_on(log, TOPICS, topic, kind)


def say(log: Log, topic: str, *events: ev.Event) -> None:
    append_events(log, TOPICS, topic, *events)


def tasks(log: Log) -> list[ev.Task]:
    return sorted(read(log, "tasks", ev.Task), key=lambda t: t.number)


def checkpoint(step: int, branch: str = "main") -> ev.Checkpoint:
    return ev.Checkpoint(
        branch=branch,
        step=step,
        kind="full",
        uri="u",
        digest="d",
        manifest_sha256="m",
        epoch=1,
        produced_at=ev.now_ms(),
    )


def cut(step: int, group_ids: list[str], branch: str = "main") -> ev.Cut:
    members = [
        ev.CutMember(trajectory_id=f"{g}:0:a", reward_revision=0, partition=0, offset=i)
        for i, g in enumerate(group_ids)
    ]
    return ev.Cut(
        branch=branch, step=step, members=members, parent="", epoch=1, produced_at=ev.now_ms()
    )


def trajectory(group_id: str, version: int, branch: str = "main") -> ev.Trajectory:
    return ev.Trajectory(
        trajectory_id=f"{group_id}:0:a",
        group_id=group_id,
        slot=0,
        attempt="a",
        producer="e",
        branch=branch,
        min_policy_version=version,
        max_policy_version=version,
        group_size=2,
        sequences=[
            ev.Sequence(
                tokens=arrays.pack_ints([1]),
                loss_mask=arrays.pack_mask([1]),
                logprobs=arrays.pack_floats([0.0]),
                policy_versions=arrays.pack_runs([version]),
            )
        ],
        finish_reason="stop",
        scores=[ev.Score(source="accuracy", value=1.0)],
        reward_sources={"accuracy": 1.0},
        produced_at=ev.now_ms(),
    )


def ends(log: Log) -> list[tuple[str, int]]:
    """Branch and number of groups of each Ended event."""
    return [(e.branch, e.num_groups) for e in read(log, "tasks", ev.Ended)]


@contextmanager
def running(url: str, chosen: SchedulerSettings) -> Iterator[threading.Thread]:
    """A scheduler in a thread with its own log, stopped at the end."""
    box: list[Process] = []

    def body() -> None:
        own = open_log(url)
        box.append(Process(own, TOPICS, name="scheduler", role="scheduler"))
        run_scheduler(box[0], chosen)
        own.close()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield thread
    finally:
        until(lambda: bool(box))
        box[0].stop()
        thread.join(60)
        assert not thread.is_alive()


def test_run_of_one_epoch_publishes_every_row_and_its_end(url, log, tmp_path):
    with running(url, settings(tmp_path)) as thread:
        say(log, "checkpoints", checkpoint(0))
        for step in (1, 2, 3):
            until(lambda step=step: len(tasks(log)) == 2 * step)
            ids = [t.group_id for t in tasks(log)][-2:]
            say(log, "train_steps", cut(step, ids))
            say(log, "checkpoints", checkpoint(step))
        thread.join(60)
        assert not thread.is_alive()
    assert [(t.group_id, t.row, t.step, t.min_policy_version) for t in tasks(log)] == [
        (f"t.{i}", i, 1 + i // 2, i // 2) for i in range(6)
    ]
    assert json.loads(tasks(log)[3].content) == {"prompt": "q3"}
    assert ends(log) == [("main", 6)]


def test_restart_goes_on_and_says_its_end_once(url, log, tmp_path):
    chosen = settings(tmp_path, total_steps=2)
    say(log, "checkpoints", checkpoint(0))
    with running(url, chosen):
        until(lambda: len(tasks(log)) == 2)
    say(log, "train_steps", cut(1, ["t.0", "t.1"]))
    say(log, "checkpoints", checkpoint(1))
    with running(url, chosen):
        until(lambda: len(tasks(log)) == 4)
    say(log, "train_steps", cut(2, ["t.2", "t.3"]))
    for _ in range(2):
        with running(url, chosen) as thread:
            thread.join(60)
            assert not thread.is_alive()
    assert [t.row for t in tasks(log)] == [0, 1, 2, 3]
    assert ends(log) == [("main", 4)]


def test_poison_records_are_left_out(url, log, tmp_path):
    producer = log.producer()
    for topic in ("drops", "trajectories", "checkpoints", "train_steps", "tasks"):
        producer.send(TOPICS.name(topic), b"poison", key=b"x")
    producer.flush()
    say(log, "checkpoints", checkpoint(0))
    with running(url, settings(tmp_path)):
        name = TOPICS.name("tasks")
        ends = [Partition(name, p) for p in range(TOPICS.partitions("tasks"))]
        until(lambda: sum(log.end_offsets(ends).values()) == 3)
    values = [r.value for r in read_to_end(log, dict.fromkeys(ends, 0)) if r.value != b"poison"]
    assert sorted(codec.decode(v or b"", ev.Task).row for v in values) == [0, 1]


def test_fork_while_it_follows_publishes_abandoned_rows_again(url, log, tmp_path):
    with running(url, settings(tmp_path, pacing=Pacing(sync_offset=1))):
        say(log, "checkpoints", checkpoint(0))
        until(lambda: len(tasks(log)) == 4)
        say(log, "train_steps", cut(1, ["t.0", "t.1"]))
        say(log, "checkpoints", checkpoint(1))
        until(lambda: len(tasks(log)) == 6)
        say(log, "trajectories", trajectory("t.2", 0), trajectory("t.3", 1))
        branch = ev.Branch(branch="main.0", parent="main", step=0, produced_at=ev.now_ms())
        say(log, "checkpoints", branch)
        say(log, "train_steps", cut(1, ["t.0", "t.1"], "main.0"))
        say(log, "checkpoints", checkpoint(1, "main.0"))
        say(log, "train_steps", cut(2, ["t.2", "t.4"], "main.0"))
        until(lambda: ends(log)[-1:] == [("main.0", 6)])
    assert len(tasks(log)) == 7
    again = tasks(log)[6]
    assert (again.row, again.replaces, again.branch, again.group_id) == (3, 3, "main.0", "t.6")


def test_configured_fork_waits_until_the_trainer_has_announced_it(url, log, tmp_path):
    say(log, "checkpoints", checkpoint(0))
    with running(url, settings(tmp_path, branch="main.0")):
        time.sleep(0.3)
        assert tasks(log) == []
        branch = ev.Branch(branch="main.0", parent="main", step=0, produced_at=ev.now_ms())
        say(log, "checkpoints", branch)
        until(lambda: len(tasks(log)) == 2)
    assert {t.branch for t in tasks(log)} == {"main.0"}


def test_successor_fences_the_one_before(log, tmp_path):
    chosen = settings(tmp_path)
    say(log, "checkpoints", checkpoint(0))
    process = Process(log, TOPICS, name="scheduler", role="scheduler")
    old = log.acquire("p.run.scheduler", owner="old", ttl_ms=1, timeout_ms=1_000)
    scheduler = Scheduler(process, chosen, Tasksets.open(chosen.tasksets), old)
    scheduler.turn()
    time.sleep(0.01)
    log.acquire("p.run.scheduler", owner="new", ttl_ms=10_000, timeout_ms=1_000)
    with pytest.raises(Fenced):
        scheduler.turn()
    assert tasks(log) == []


def test_groups_without_a_reward_leave_the_window_until_it_comes(url, log, tmp_path):
    say(log, "checkpoints", checkpoint(0))
    chosen = settings(tmp_path, total_steps=3, reward_wait_ms=50)
    with running(url, chosen):
        until(lambda: len(tasks(log)) == 2)
        for slot in (0, 1):
            waiting = ev.Trajectory(
                trajectory_id=f"t.0:{slot}:a",
                group_id="t.0",
                slot=slot,
                attempt="a",
                producer="e",
                branch="main",
                min_policy_version=0,
                max_policy_version=0,
                group_size=2,
                sequences=[],
                claim=ev.Claim(uri="memory://x", sha256="0", size_bytes=1),
                finish_reason="stop",
                reward_sources={"people": 1.0},
                produced_at=ev.now_ms(),
            )
            say(log, "trajectories", waiting)
        until(lambda: len(tasks(log)) == 3)
        assert tasks(log)[2].step == 1
