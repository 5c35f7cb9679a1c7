"""Algorithms with state or passes of their own, in whole runs on the embedded log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import SmallRun

from streamrft.schemas import events as ev

PPO = {"algorithm_type": "ppo", "kl_loss_fn": "k2"}
CORRECTED = {
    "algorithm_type": "gspo",
    "kl_penalty_fn": "k1",
    "rollout_correction": {
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k2",
        "rollout_rs_threshold": 0.5,
    },
}


def metrics_of(run: SmallRun) -> list[dict[str, float]]:
    steps = sorted(run.events("train_steps", ev.TrainStep), key=lambda s: s.step)
    return [dict(s.metrics) for s in steps]


def test_a_killed_trainer_goes_on_with_the_same_critic(
    small_run: Callable[..., SmallRun],
) -> None:
    whole, killed = small_run({"algorithm": PPO}), small_run({"algorithm": PPO})
    whole.finish()
    killed.finish_killed_at("trainer.step_done@3")
    killed.check_whole()
    assert killed.final_digest() == whole.final_digest()
    for metrics in metrics_of(whole):
        assert {"critic/vf_loss", "critic/vpred_mean", "actor/kl_loss"} <= metrics.keys()
        assert all(math.isfinite(v) for v in metrics.values())
    assert metrics_of(whole)[-1]["critic/vpred_mean"] != 0.0


def test_a_corrected_run_trains_and_says_how_far_engine_and_trainer_are_apart(
    small_run: Callable[..., SmallRun],
) -> None:
    run = small_run({"algorithm": CORRECTED}, steps=2)
    run.finish()
    run.check_whole()
    for metrics in metrics_of(run):
        assert {"rollout_corr/rollout_is_mean", "critic/kl"} <= metrics.keys()
        assert metrics["actor/skipped_updates"] == 0.0
        assert metrics["actor/logprob_gap_max"] < 1e-3
        assert abs(metrics["actor/logprob_gap_kl"]) < 1e-4
        assert metrics["sample/unusable"] == 0.0


def test_a_trainer_of_two_ranks_loses_one_and_reaches_its_goal(
    small_run: Callable[..., SmallRun], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i}+2={i + 2}"}) + "\n" for i in range(9)))
    rows = {"storage_type": "file", "path": str(texts), "format": {"prompt_key": "text"}}
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": rows}}
    trainer = {"num_ranks": 2, "save_interval": 20}
    algorithm = {"algorithm_type": "cpt", "kl_loss_fn": None}
    config = {"mode": "train", "algorithm": algorithm, "buffer": buffer}
    run = small_run({**config, "trainer": trainer}, steps=40)
    process = run.start(hold_at="trainer.step_done@40")
    run.wait_for(lambda: len(run.children("rank-1")) > 0 and metrics_of(run), "step of two ranks")
    run.children("rank-1")[0].kill()
    run.let_go()
    assert process.wait(480) == 0, run.output()
    assert "trainer ended" in run.output() and "ranks are not together" in run.output()
    losses = [m["actor/pg_loss"] for m in metrics_of(run)]
    assert len(losses) == 40 and losses[-1] < 0.8 * losses[0]
    assert not run.children("rank-1")


PREFERRED = {"algorithm_type": "dpo", "kl_loss_fn": None}


def test_a_killed_run_trains_pairs_of_its_own_rollouts_and_the_ledger_balances(
    small_run: Callable[..., SmallRun], tmp_path: Path
) -> None:
    run = small_run({"algorithm": PREFERRED}, steps=2)
    run.finish(STREAMRFT_KILL_AT=f"trainer.cut_published@2={tmp_path / 'killed'}")
    assert (tmp_path / "killed").exists()
    run.check_whole()
    rewards = {e.trajectory_id: e.reward for e in run.events("experiences", ev.Experience)}
    for cut in run.cuts():
        ids = [m.trajectory_id for m in cut.members]
        assert len(ids) == 2 * 4
        for wanted, other in zip(ids[0::2], ids[1::2], strict=True):
            assert ev.group_of(wanted) == ev.group_of(other)
            assert (rewards[wanted], rewards[other]) == (1.0, 0.0)
    drops = [d for d in run.events("drops", ev.Drop) if d.where == "trainer"]
    assert {d.reason for d in drops} == {"filtered"}
    assert any("is in no pair" in d.detail for d in drops)
    assert any("every reward of the group is" in d.detail for d in drops)
    first, last = metrics_of(run)
    assert first["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["actor/reward_margin"] != 0.0


def test_a_run_that_cannot_save_says_so_by_its_exit_code_and_in_status(
    small_run: Callable[..., SmallRun], tmp_path: Path
) -> None:
    texts, gone = tmp_path / "texts.jsonl", tmp_path / "not-mounted"
    texts.write_text(json.dumps({"text": "2+2=4"}) + "\n")
    gone.write_text("a file where a disk should be")
    form, limit = {"prompt_key": "text"}, {"max_read_timeout": 1}
    rows = {"storage_type": "file", "path": str(texts), "format": form, **limit}
    buffer = {"train_batch_size": 1, "trainer_input": {"experience_buffer": rows}}
    algorithm = {"algorithm_type": "cpt", "kl_loss_fn": None}
    config = {"mode": "train", "algorithm": algorithm, "buffer": buffer}
    run = small_run({**config, "storage": {"uri": str(gone)}}, steps=2)
    assert run.start().wait(180) == 5, run.output()
    assert "step 0 is not saved after 1 s" in run.output()
    status = json.loads(run.tool("status", "--json").stdout)
    failed = status["save_failed"]
    assert (failed["step"], failed["kind"]) == (0, "full") and str(gone) in failed["reason"]
    told = run.tool("status").stdout
    assert "not saved" in told and "full of step 0 since" in told
    gone.unlink()
    rows["max_read_timeout"] = 60
    run.write()
    run.finish()
    assert json.loads(run.tool("status", "--json").stdout)["save_failed"] is None
