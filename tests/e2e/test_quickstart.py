"""The quickstart as a newcomer meets it, with fewer steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
STEPS = 6


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory):
    """Run a Python program of the example in one folder of its own; returns what it did."""
    folder = tmp_path_factory.mktemp("newcomer")
    environment = os.environ | {
        "QUICKSTART_ROOT": str(folder / "runs"),
        "QUICKSTART_STEPS": str(STEPS),
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=480,
            check=False,
        )

    config = ("--config", str(EXAMPLE / "quickstart.yaml"))
    cli = ("-m", "streamrft.deploy.cli")
    run.config, run.cli, run.root = config, cli, folder / "runs"  # type: ignore[attr-defined]
    built = run(str(EXAMPLE / "build.py"))
    assert built.returncode == 0, built.stderr
    trained = run(*cli, "run", *config, "--plugin-dir", str(EXAMPLE / "plugins"))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return run


def test_the_same_command_again_has_nothing_left_to_do(call):
    """First of all, so that every other test is of a run that was started twice."""
    again = call(*call.cli, "run", *call.config, "--plugin-dir", str(EXAMPLE / "plugins"))
    assert again.returncode == 0, again.stdout + again.stderr


def test_report_shows_the_run_and_asks_the_trained_model(call):
    shown = call(str(EXAMPLE / "report.py"), "--min-climb", "-1")
    assert shown.returncode == 0, shown.stderr
    assert f"reward by step, 1 to {STEPS}" in shown.stdout
    assert "the model says: sort 4071 -> " in shown.stdout
    assert (call.root / "quickstart" / "sort" / "reward.png").stat().st_size > 5_000


def test_report_fails_when_the_reward_did_not_climb(call):
    shown = call(str(EXAMPLE / "report.py"), "--min-climb", "0.99")
    assert shown.returncode == 1
    assert "less than 0.99: the run did not learn" in shown.stderr


def test_warm_up_and_rft_leave_folders_that_transformers_loads(call):
    from transformers import AutoModelForCausalLM

    for stage, step in (("warmup", 45), ("rft", STEPS)):
        folder = call.root / "quickstart" / "sort" / stage / f"global_step_{step}"
        model = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface")
        assert model.num_parameters() > 400_000


def test_the_ledger_of_the_finished_run_balances(call):
    status = call(*call.cli, "status", *call.config)
    assert status.returncode == 0, status.stdout + status.stderr


def test_a_model_that_was_removed_is_named_with_what_to_do(call):
    kept = call.root / "quickstart" / "sort" / "rft"
    away = kept.rename(kept.with_name("away"))
    try:
        again = call(*call.cli, "run", *call.config, "--plugin-dir", str(EXAMPLE / "plugins"))
        assert again.returncode == 1
        assert f"{kept}/global_step_{STEPS} is gone" in again.stdout
        shown = call(str(EXAMPLE / "report.py"), "--min-climb", "-1")
        assert shown.returncode == 1 and "Traceback" not in shown.stderr
        assert "give the run another name and train it again" in shown.stderr
    finally:
        away.rename(kept)
