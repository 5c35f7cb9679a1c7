"""Whole runs that go back on purpose, and training again from recorded cuts.

Every test gets a run that has ended, and what it does to the run's folder is undone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRun, merge

from streamrft.schemas import events as ev

EVERY_STEP: Mapping[str, Any] = {"trainer": {"save_interval": 1}}
ASYNC: Mapping[str, Any] = {
    "deterministic": False,
    "synchronizer": {"sync_style": "fully_async", "max_staleness": 2},
}


@dataclass(frozen=True)
class Forked:
    """A run that went back to step 2 and ended; `before` is a copy of its folder until then."""

    run: SmallRun
    before: Path


@contextmanager
def undone(run: SmallRun) -> Iterator[None]:
    """What happens to the run's folder in here is undone at the end."""
    kept = run.folder.with_name("kept")
    shutil.copytree(run.folder, kept)
    try:
        yield
    finally:
        run.kill()
        replace(run, kept)
        shutil.rmtree(kept)


def replace(run: SmallRun, folder: Path) -> None:
    """Make the run's folder a copy of another: its paths, which the log names, stay the same."""
    shutil.rmtree(run.folder)
    shutil.copytree(folder, run.folder)


def go_back(run: SmallRun, step: int) -> None:
    """Ask in the configuration for a fork from a step."""
    run.overrides = merge(run.overrides, {"resume_from": f"global_step_{step}"})
    run.write()


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Forked]:
    """On-policy."""
    place = tmp_path_factory.mktemp("forked")
    run = SmallRun(place / "run", tiny_model_dir, EVERY_STEP)
    try:
        run.finish()
        go_back(run, 2)
        shutil.copytree(run.folder, place / "before")
        run.finish()
        yield Forked(run, place / "before")
    finally:
        run.kill()


@pytest.fixture(scope="module")
def asynchronous(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[SmallRun]:
    """A run whose trainer was killed between a cut and its step."""
    place = tmp_path_factory.mktemp("asynchronous")
    run = SmallRun(place / "run", tiny_model_dir, merge(EVERY_STEP, ASYNC), steps=7)
    try:
        run.finish_killed_at("trainer.cut_published@4")
        yield run
    finally:
        run.kill()


def test_going_back_forks_and_a_second_start_continues_the_fork(forked: Forked) -> None:
    run = forked.run
    with undone(run):
        before = len(run.records("train_steps"))
        run.finish()
        assert len(run.records("train_steps")) == before, "a second start trained again"
        check_fork(run)


@pytest.mark.slow
def test_an_asynchronous_run_forks_in_the_same_way(asynchronous: SmallRun) -> None:
    with undone(asynchronous):
        go_back(asynchronous, 2)
        asynchronous.finish()
        assert len(asynchronous.events("checkpoints", ev.Branch)) == 1
        check_fork(asynchronous)


def check_fork(run: SmallRun) -> None:
    """The steps of the lineage are whole, and so is the ledger."""
    branches = run.events("checkpoints", ev.Branch)
    assert {(b.branch, b.parent, b.step) for b in branches} == {("main.2", "main", 2)}
    cuts = run.events("train_steps", ev.Cut)
    lineage = [c for c in cuts if (c.branch, c.step > 2) in {("main", False), ("main.2", True)}]
    assert sorted(c.step for c in lineage) == list(range(1, run.steps + 1))
    trained = [m.trajectory_id for c in lineage for m in c.members]
    assert len(trained) == len(set(trained))
    check_nothing_off_lineage_was_trained(run, lineage)
    status = run.tool("status")
    assert status.returncode == 0, status.stdout + status.stderr


def check_nothing_off_lineage_was_trained(run: SmallRun, lineage: list[ev.Cut]) -> None:
    """What newer weights than the fork wrote is dropped, and its rows are published again."""
    wrote = {t.trajectory_id: t for t in run.events("trajectories", ev.Trajectory)}
    after = [wrote[m.trajectory_id] for c in lineage if c.step > 2 for m in c.members]
    assert all(t.branch == "main.2" or t.max_policy_version <= 2 for t in after)
    drops = [d for d in run.events("drops", ev.Drop) if d.reason == "off_lineage"]
    assert drops, "the abandoned steps left nothing behind"
    rows = {wrote[d.trajectory_id].row for d in drops}
    again = {t.row for t in run.events("tasks", ev.Task) if t.branch == "main.2"}
    assert rows <= again, f"rows {sorted(rows - again)} were not published again"


def test_a_fork_that_is_killed_is_continued_by_the_same_command(forked: Forked) -> None:
    run, quiet = forked.run, newest_digest(forked.run)
    with undone(run):
        replace(run, forked.before)
        run.finish_killed_at("trainer.step_done@3")
        assert run.tool("status").returncode == 0
        assert newest_digest(run) == quiet


def newest_digest(run: SmallRun) -> str:
    found = [c for c in run.events("checkpoints", ev.Checkpoint) if c.branch == "main.2"]
    return max(found, key=lambda c: c.step).digest


def test_an_asynchronous_run_equals_a_training_from_its_own_cuts(asynchronous: SmallRun) -> None:
    run = asynchronous
    run.check_whole()
    announced = run.final_digest()
    with undone(run):
        for folder in run.job.glob("global_step_*"):
            if folder.name != "global_step_0":
                shutil.rmtree(folder)
        again = run.tool("train")
        assert again.returncode == 0, again.stderr
        manifest = json.loads((run.job / "global_step_7" / "manifest.json").read_text())
        assert manifest["digest"] == announced
        assert run.final_digest() == announced
