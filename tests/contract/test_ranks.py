"""Two gloo ranks train as one process does, and end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import (
    Kept,
    fail_once,
    go_on_and_save,
    go_on_twice,
    preferences,
    save,
    step_and_wait,
    steps,
)
from rank_team import start_team
from safetensors.torch import load_file
from tiny_learner import learner_settings, mixed
from waiting import until

from streamrft.consumers.checkpoints import CheckpointStore
from streamrft.consumers.convert.convert import Request, convert
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.resume import load_newest
from streamrft.consumers.settings import FunctionSettings, LoraSettings

pytestmark = pytest.mark.usefixtures("torch_as_before")

KL = FunctionSettings("k2", {"kl_coef": 0.5})
ENTROPY = FunctionSettings("default", {"entropy_coef": 0.01})
GRPO = {
    "kl_loss_fn": KL,
    "entropy_loss_fn": ENTROPY,
    "bypass_old_logprobs": False,
    "max_tokens_per_microbatch": 128,
}


def assert_same_curve(found: Kept, expected: Kept) -> None:
    """Every metric but times, and the weights, within what the order of sums changes."""
    assert len(found.metrics) == len(expected.metrics)
    for i, (one, other) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert one.keys() == other.keys()
        for name in one.keys() - {"time/train_s", "perf/tokens_per_s"}:
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), (i, name)
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(GRPO, id="kl to a reference, entropy, measured before the step"),
        pytest.param({"algorithm_type": "ppo"}, id="critic"),
        pytest.param({"algorithm_type": "kto"}, id="baseline of mismatched answers"),
    ],
)
def test_two_ranks_give_the_curve_of_one(tmp_path: Path, tiny_model_dir: Path, changes: Any):
    settings = learner_settings(tiny_model_dir, **changes)
    team = start_team(2, settings, steps, tmp_path)
    expected = steps(Learner(settings, total_steps=None))
    found = team.result()
    assert_same_curve(found, expected)
    norms = [m["actor/grad_norm"] for m in expected.metrics]
    assert max(norms) > 0
    assert any(m["actor/skipped_updates"] == 1 for m in expected.metrics)


def test_pairs_stay_together_on_a_rank(tmp_path: Path, tiny_model_dir: Path):
    settings = learner_settings(tiny_model_dir, algorithm_type="dpo")
    team = start_team(2, settings, preferences, tmp_path)
    expected = preferences(Learner(settings, total_steps=None))
    assert expected.metrics[1]["actor/grad_norm"] > 0
    assert_same_curve(team.result(), expected)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_bits(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_any_number_of_ranks_goes_on_from_a_checkpoint_in_shards(
    tmp_path: Path, tiny_model_dir: Path
):
    """One process, then two ranks, three (rows are uneven), and one again: all on one curve."""
    settings = learner_settings(tiny_model_dir, algorithm_type="ppo")
    folder, one = tmp_path / "checkpoints", Learner(settings, total_steps=None)
    steps(one, [0])
    saved = {1: save(folder, 1, one)}
    expected = Learner(settings, total_steps=None)
    steps(expected, [0])
    for step, size in ((2, 2), (3, 3), (4, 1)):
        job = partial(go_on_and_save, folder, [step], step)
        if size > 1:
            found = start_team(size, settings, job, tmp_path / f"{size}").result()
        else:
            found = job(Learner(settings, total_steps=None))
        loaded, stepped, next_saved = found
        for part in ("weights", "optimizer"):
            assert_same_bits(getattr(loaded, part), getattr(saved[step - 1], part))
        assert_same_curve(stepped, steps(expected, [step], step))
        saved[step] = next_saved
    written = {s.manifest.step: s for s in CheckpointStore(str(folder), "main").scan()}
    assert [s for s in written if written[s].manifest.is_sharded] == [3, 2]
    for step, size in ((2, 2), (3, 3)):
        shards = folder / f"global_step_{step}" / "actor" / "dcp"
        sizes = [p.stat().st_size for p in shards.glob("*.distcp")]
        assert len(sizes) == size
        # no rank wrote, or held in its copy, much more than its share
        assert max(sizes) < 1.25 * sum(sizes) / size
    models = converted(folder / "global_step_3", tiny_model_dir, tmp_path)
    assert_same_bits(dict(sorted(models["actor"].items())), dict(sorted(saved[3].weights.items())))
    assert models["critic"]["score.weight"].abs().sum() > 0
    in_place = convert(Request(folder / "global_step_3", with_critic=True, dtype="bfloat16"))
    assert [o.state for o in in_place] == ["present", "converted"]
    again = {s.manifest.step: s for s in CheckpointStore(str(folder), "main").scan()}
    assert load_newest(one, [(CheckpointStore(str(folder), "main"), again[3])]) is not None
    change_a_bit(folder / "global_step_3" / "actor" / "dcp" / "__2_0.distcp")
    store = CheckpointStore(str(folder), "main")
    base = load_newest(one, [(store, written[3]), (store, written[2])])
    assert base is not None and base.saved.manifest.step == 2
    assert_same_bits(one.state_dict(), saved[2].weights)


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_rank_that_cannot_write_fails_the_save_and_not_the_team(
    tmp_path: Path, tiny_model_dir: Path
):
    settings = learner_settings(tiny_model_dir)
    why = start_team(2, settings, partial(fail_once, tmp_path), tmp_path / "team").result()
    assert "the shards of rank 1" in why and "Is a directory" in why
    (saved,) = CheckpointStore(str(tmp_path), "main").scan()
    assert saved.manifest.is_sharded


def test_each_rank_drops_at_random_by_itself_and_again_after_a_resume(
    tmp_path: Path, tiny_model_dir: Path
):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    dropping, plain = learner_settings(folder), learner_settings(tiny_model_dir)
    team = start_team(2, dropping, partial(go_on_twice, tmp_path / "two"), tmp_path / "team")
    found = [Learner(settings, total_steps=None) for settings in (dropping, plain)]
    weights = [steps(one, [0]).weights["model.norm.weight"] for one in found]
    assert not torch.equal(*weights), "it drops in training"
    with torch.random.fork_rng():
        again = go_on_twice(tmp_path / "one", Learner(dropping, total_steps=None))
    for new, straight_on, resumed in (again, team.result()):
        assert len({state["cpu"].numpy().tobytes() for state in new.rng}) == len(new.rng)
        assert_same_bits(resumed.weights, straight_on.weights)
        assert_same_bits(resumed.rng, straight_on.rng)


def test_what_is_measured_before_a_step_is_not_dropped(tmp_path: Path, tiny_model_dir: Path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    one = Learner(learner_settings(folder, bypass_old_logprobs=False), total_steps=None)
    wanted = frozenset({"current_logprobs"})
    state = torch.get_rng_state()
    first, second = (one._measured(mixed(1), wanted)["current_logprobs"] for _ in range(2))
    assert (first == second).all() and torch.equal(torch.get_rng_state(), state)
    assert one.model.training
    settings = learner_settings(folder, lora=LoraSettings(rank=2, alpha=2), kl_loss_fn=KL)
    adapted = Learner(settings, total_steps=None)
    with adapted.policy.reference() as below:
        assert not below.training
    assert below.training
    with adapted.policy.without_dropout():
        with adapted.policy.reference():
            pass
        assert not below.training, "who measures goes on"
    assert below.training


def converted(step: Path, base: Path, into: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What `convert` makes of the shards of a step alone."""
    found = {}
    for part in ("actor", "critic"):
        shutil.copytree(step / part / "dcp", into / part)
        (outcome,) = convert(Request(into / part, base))
        assert outcome.state == "converted", outcome
        found[part] = load_file(outcome.folder / "model.safetensors")
    return found


@pytest.mark.parametrize(
    "rank, number, word",
    [(0, signal.SIGKILL, "rank 1 of 2"), (1, signal.SIGKILL, "rank 0 of 2")]
    + [(1, signal.SIGSTOP, "rank 0 of 2")],
)
def test_all_end_with_a_name_when_one_rank_is_gone(
    tmp_path: Path, tiny_model_dir: Path, rank: int, number: int, word: str
):
    marker = tmp_path / "stepped"
    settings = learner_settings(tiny_model_dir)
    job = partial(step_and_wait, marker, limit_s=2)
    team = start_team(2, settings, job, tmp_path / "team")
    until(marker.exists, "a step of the team")
    gone, left = team.processes[rank], team.processes[1 - rank]
    os.kill(gone.pid, number)
    left.join(60)
    assert left.exitcode == 1, team.said()
    assert f"RanksLost: {word}" in team.said()
    gone.kill()
