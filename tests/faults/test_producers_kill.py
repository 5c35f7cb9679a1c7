"""Scheduler and explorer killed with SIGKILL anywhere: no row and no rollout is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from producer_run import BATCH, GROUP, ProducerRun
from waiting import until

from streamrft.producers.settings import Pacing
from streamrft.schemas import events as ev

KILLED = -signal.SIGKILL


def check_tasks(run: ProducerRun) -> None:
    tasks = run.tasks()
    assert [t.number for t in tasks] == list(range(run.num_rows))
    assert [t.row for t in tasks] == list(range(run.num_rows))
    assert all(t.step == 1 + t.number // BATCH for t in tasks)
    ended = [e for e in run.read("tasks") if isinstance(e, ev.Ended)]
    assert [e.num_groups for e in ended] == [run.num_rows]


def train_what_is_there(run: ProducerRun, step: int) -> int:
    """Train the next step when all its tasks are published; the last step that was."""
    if sum(t.step == step + 1 for t in run.tasks()) == BATCH:
        run.train(step + 1)
        return step + 1
    return step


@pytest.mark.parametrize(
    "point",
    [
        "scheduler.before_commit@1",
        "scheduler.before_commit@4",
        "scheduler.committed@1",
        "scheduler.committed@4",
    ],
)
def test_scheduler_killed_at_a_point_loses_and_doubles_no_row(
    point: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = ProducerRun(tmp_path, tiny_model_dir)
    run.announce(0)
    process, step, deaths = run.start("scheduler", point), 0, 0
    deadline = time.monotonic() + 240
    while process.is_alive() or process.exitcode == KILLED:
        assert time.monotonic() < deadline
        if process.exitcode == KILLED:
            deaths += 1
            process = run.start("scheduler", point)
        step = train_what_is_there(run, step)
        time.sleep(0.02)
    assert (process.exitcode, deaths) == (0, 1)
    check_tasks(run)


def test_scheduler_killed_at_random_loses_and_doubles_no_row(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = ProducerRun(tmp_path, tiny_model_dir, num_rows=40)
    run.announce(0)
    chance = random.Random(7)
    process, step, deaths = run.start("scheduler"), 0, 0
    deadline, dies_at = time.monotonic() + 240, time.monotonic() + 0.3
    while process.is_alive() or process.exitcode != 0:
        now = time.monotonic()
        assert now < deadline
        if process.is_alive() and now > dies_at and deaths < 12:
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            deaths += 1
            process = run.start("scheduler")
            dies_at = now + chance.uniform(0.02, 0.6)
        if deaths >= step // 2:
            step = train_what_is_there(run, step)
    assert deaths >= 9
    check_tasks(run)


def check_rollouts(run: ProducerRun) -> None:
    """Every slot has a trajectory; a second one is another execution that wrote the same."""
    assert run.num_uncommitted() == 0
    made: dict[tuple[int, int], list[ev.Trajectory]] = {}
    for t in run.read("trajectories"):
        made.setdefault((t.number, t.slot), []).append(t)
    assert set(made) == {(n, s) for n in range(run.num_rows) for s in range(GROUP)}
    for same in made.values():
        assert len({t.attempt for t in same}) == len(same)
        assert len({t.sequences[0].tokens for t in same}) == 1
        assert not any(t.is_failed for t in same)


def publish_all(run: ProducerRun) -> None:
    run.announce(0)
    run.schedule = replace(run.schedule, pacing=Pacing(style="fully_async", max_staleness=999))
    process = run.start("scheduler")
    until(lambda: len(run.tasks()) == run.num_rows, "tasks")
    process.kill()
    process.join(60)


def test_explorer_killed_at_every_point_loses_no_rollout(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    run = ProducerRun(tmp_path, tiny_model_dir)
    publish_all(run)
    for point in ("explorer.generated", "explorer.published", "explorer.committed"):
        process = run.start("explorer", point)
        process.join(180)
        assert process.exitcode == KILLED
        if point == "explorer.generated":
            assert run.read("trajectories") == []
    if run.num_uncommitted():
        process = run.start("explorer")
        until(lambda: run.num_uncommitted() == 0, "commits")
        process.terminate()
        process.join(60)
        assert process.exitcode == 0
    check_rollouts(run)


def test_explorers_killed_at_random_lose_no_rollout(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = ProducerRun(tmp_path, tiny_model_dir, num_rows=60)
    publish_all(run)
    chance = random.Random(3)
    explorers = [run.start("explorer"), run.start("explorer")]
    for _ in range(4):
        time.sleep(chance.uniform(0.1, 0.8))
        explorers[0].kill()
        explorers[0].join(60)
        explorers = [explorers[1], run.start("explorer")]
    until(lambda: run.num_uncommitted() == 0, "commits")
    living = {process.pid for process in explorers}
    until(lambda: living <= {beat.pid for beat in run.read("heartbeats")}, "signs of both")
    for process in explorers:
        process.terminate()
        process.join(60)
        assert process.exitcode == 0
    check_rollouts(run)
