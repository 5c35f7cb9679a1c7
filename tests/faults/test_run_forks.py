"""Whole runs that go back on purpose, and training again from recorded cuts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from small_run import SmallRun, merge

from streamrft.schemas import events as ev

Make = Callable[..., SmallRun]
EVERY_STEP: Mapping[str, Any] = {"trainer": {"save_interval": 1}}
ASYNC: Mapping[str, Any] = {
    "deterministic": False,
    "synchronizer": {"sync_style": "fully_async", "max_staleness": 2},
}


def go_back(run: SmallRun, step: int) -> None:
    """Ask in the configuration for a fork from a step."""
    run.overrides = merge(run.overrides, {"resume_from": f"global_step_{step}"})
    run.write()


@pytest.mark.parametrize(
    ("pacing", "steps"), [({}, 4), (ASYNC, 7)], ids=["on-policy", "fully-async"]
)
def test_going_back_forks_and_a_second_start_continues_the_fork(
    pacing: Mapping[str, Any], steps: int, small_run: Make
) -> None:
    run = small_run(merge(EVERY_STEP, pacing), steps=steps)
    run.finish()
    go_back(run, 2)
    run.finish()
    before = len(run.records("train_steps"))
    run.finish()

    assert len(run.records("train_steps")) == before, "a second start trained again"
    branches = run.events("checkpoints", ev.Branch)
    assert {(b.branch, b.parent, b.step) for b in branches} == {("main.2", "main", 2)}
    cuts = run.events("train_steps", ev.Cut)
    lineage = [c for c in cuts if (c.branch, c.step > 2) in {("main", False), ("main.2", True)}]
    assert sorted(c.step for c in lineage) == list(range(1, steps + 1))
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


def test_a_fork_that_is_killed_is_continued_by_the_same_command(
    small_run: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    quiet, killed = small_run(EVERY_STEP), small_run(EVERY_STEP)
    marker = tmp_path_factory.mktemp("marker") / "killed"
    for run in (quiet, killed):
        run.finish()
        go_back(run, 2)
    quiet.finish()
    killed.finish(STREAMRFT_KILL_AT=f"trainer.step_done@3={marker}")
    assert marker.exists()
    assert killed.tool("status").returncode == 0
    assert newest_digest(killed) == newest_digest(quiet)


def newest_digest(run: SmallRun) -> str:
    found = [c for c in run.events("checkpoints", ev.Checkpoint) if c.branch == "main.2"]
    return max(found, key=lambda c: c.step).digest


def test_an_asynchronous_run_equals_a_training_from_its_own_cuts(
    small_run: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = small_run(ASYNC, steps=6)
    marker = tmp_path_factory.mktemp("marker") / "killed"
    run.finish(STREAMRFT_KILL_AT=f"trainer.cut_published@4={marker}")
    assert marker.exists()
    run.check_whole()
    announced = run.final_digest()
    for folder in run.job.glob("global_step_*"):
        if folder.name != "global_step_0":
            shutil.rmtree(folder)
    again = run.tool("train", timeout_s=120)
    assert again.returncode == 0, again.stderr
    manifest = json.loads((run.job / "global_step_6" / "manifest.json").read_text())
    assert manifest["digest"] == announced
    assert run.final_digest() == announced
