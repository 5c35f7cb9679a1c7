"""A whole run killed anywhere: the ledger balances and the weights are those of a quiet run.

`make faults` runs every case; the tests run a sample, one of each kind, several in one run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_run import SmallRun

from streamrft.schemas import events as ev

STEPS = 4


@dataclass(frozen=True)
class Case:
    """Processes kill themselves at `points`; `roles` are killed from outside at some time."""

    name: str
    points: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    seed: int = 0


POINTS = (
    "trainer.cut_published",
    "trainer.step_done",
    "checkpoint.weights_written",
    "checkpoint.state_written",
    "checkpoint.manifest_written",
    "checkpoint.published",
    "checkpoint.committed",
)
LATER = {"checkpoint.state_written": 4}  # only a full save comes here: every second step
OTHERS = (
    "explorer.generated",
    "explorer.published",
    "explorer.committed",
    "join.before_commit",
    "join.committed",
    "scheduler.before_commit",
    "scheduler.committed",
)
SAMPLE = [
    Case(
        "points of every kind",
        points=(
            "join.before_commit",
            "explorer.published",
            "checkpoint.manifest_written@2",
            "trainer.cut_published@3",
        ),
    ),
    Case("supervisor and trainer", roles=("supervisor", "train")),
]
# 14 in the checkpoint protocol and around the cut, 7 elsewhere, 10 from outside
CASES = [
    *(Case(f"{p}@{s}", (f"{p}@{s}",)) for p in POINTS for s in (2, LATER.get(p, 3))),
    *(Case(p, (p,)) for p in OTHERS),
    *(
        Case(f"{role}-{seed}", roles=(role,), seed=seed)
        for role in ("schedule", "explore", "join", "train", "supervisor")
        for seed in range(2)
    ),
]


def parameters() -> list[object]:
    """All cases, those outside the sample marked slow."""
    slow = [pytest.param(c, id=c.name, marks=pytest.mark.slow) for c in CASES]
    return [*(pytest.param(c, id=c.name) for c in SAMPLE), *slow]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> SmallRun:
    """An uninterrupted run."""
    run = SmallRun(tmp_path_factory.mktemp("quiet"), tiny_model_dir, steps=STEPS)
    run.finish()
    run.check_whole()
    return run


def test_a_quiet_run_on_policy_trains_on_nothing_stale(quiet: SmallRun) -> None:
    stalest = [s.metrics["sample/staleness_max"] for s in quiet.events("train_steps", ev.TrainStep)]
    assert stalest == [0.0] * STEPS


@pytest.mark.parametrize("case", parameters())
def test_a_killed_run_ends_whole_with_the_weights_of_a_quiet_run(
    case: Case, small_run: Callable[..., SmallRun], quiet: SmallRun
) -> None:
    run = small_run(steps=STEPS)
    if case.points:
        run.finish_killed_at(*case.points)
    else:
        kill_roles(run, case.roles, random.Random(case.seed))
    run.check_whole()
    assert run.final_digest() == quiet.final_digest()


def kill_roles(run: SmallRun, roles: tuple[str, ...], chance: random.Random) -> None:
    """SIGKILL to one role after the other, each after another cut; then the run ends with 0.

    A step takes most of a second, and the last does not begin before the kills.
    """
    how = {"hold_at": f"trainer.step_done@{STEPS - 1}", "PARITY_S": "0.05"}
    process = run.start(**how)
    for num_cuts, role in enumerate(roles, 1):
        await_cuts(run, num_cuts)
        time.sleep(chance.uniform(0, 0.5))
        if role == "supervisor":
            run.kill_supervisor(process)
            process = run.start(**how)
        else:
            for child in run.living(role, process):
                child.kill()
    run.let_go()
    assert process.wait(480) == 0, run.output()


def await_cuts(run: SmallRun, num_cuts: int) -> None:
    run.wait_for(lambda: len(run.cuts()) >= num_cuts, f"cut {num_cuts}")
