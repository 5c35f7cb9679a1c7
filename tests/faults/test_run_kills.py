"""A whole run killed anywhere: the ledger balances and the weights are those of a quiet run.

`make faults` runs every case; the tests run a sample, one of each kind.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_run import SmallRun

STEPS = 4


@dataclass(frozen=True)
class Case:
    """`point`: a process kills itself there. `role`: it is killed from outside at some time."""

    name: str
    point: str = ""
    role: str = ""
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
SAMPLE = {
    "trainer.cut_published@3",
    "checkpoint.manifest_written@2",
    "explorer.published",
    "join.before_commit",
    "train-0",
    "supervisor-0",
}
# 14 in the checkpoint protocol and around the cut, 7 elsewhere, 10 from outside
CASES = [
    *(Case(f"{p}@{s}", point=f"{p}@{s}") for p in POINTS for s in (2, LATER.get(p, 3))),
    *(Case(p, point=p) for p in OTHERS),
    *(
        Case(f"{role}-{seed}", role=role, seed=seed)
        for role in ("schedule", "explore", "join", "train", "supervisor")
        for seed in range(2)
    ),
]


def parameters() -> list[object]:
    """All cases, those outside the sample marked slow."""
    return [
        pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow)
        for c in CASES
    ]


@pytest.fixture(scope="module")
def quiet_digest(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> str:
    """Final weights of an uninterrupted run."""
    run = SmallRun(tmp_path_factory.mktemp("quiet"), tiny_model_dir, steps=STEPS)
    run.finish()
    run.check_whole()
    return run.final_digest()


@pytest.mark.parametrize("case", parameters())
def test_a_killed_run_ends_whole_with_the_weights_of_a_quiet_run(
    case: Case, tmp_path: Path, small_run: Callable[..., SmallRun], quiet_digest: str
) -> None:
    run = small_run(steps=STEPS)
    if case.point:
        marker = tmp_path / "killed"
        run.finish(STREAMRFT_KILL_AT=f"{case.point}={marker}")
        assert marker.exists(), f"the run never reached {case.point}"
    elif case.role == "supervisor":
        kill_supervisor(run, random.Random(case.seed))
        run.finish()
    else:
        kill_role(run, case.role, random.Random(case.seed))
    run.check_whole()
    assert run.final_digest() == quiet_digest


def kill_supervisor(run: SmallRun, chance: random.Random) -> None:
    """SIGKILL to the supervisor once training goes on: none of its children outlives it."""
    process = run.start()
    run.wait_for(lambda: len(run.cuts()) >= 1, "first cut", 120)
    time.sleep(chance.uniform(0, 1.0))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    run.wait_for(lambda: not run.children(), "end of the children", 10)


def kill_role(run: SmallRun, role: str, chance: random.Random) -> None:
    """SIGKILL to one role in the middle; the supervisor replaces it and the run ends with 0."""
    process = run.start()
    run.wait_for(lambda: len(run.cuts()) >= 1, "first cut", 120)
    time.sleep(chance.uniform(0, 0.5))
    for child in run.children(f" {role} "):
        child.kill()
    assert process.wait(180) == 0, run.output()
