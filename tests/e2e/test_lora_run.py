"""Whole runs over an adapter: explorers that load the model once, a kill, and what is left."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_run import SmallRun
from transformers import AutoConfig, AutoModelForCausalLM

from streamrft.deploy.cli import main
from streamrft.schemas import arrays
from streamrft.schemas import events as ev

# peft asks its own models for it, and transformers 5.24 renamed it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
STEPS = 3
LORA = {
    "model": {"lora_configs": [{"name": "a", "lora_rank": 4, "lora_alpha": 8}]},
    "algorithm": {
        "kl_loss_fn": "k2",
        "kl_loss_fn_args": {"kl_coef": 0.01},
        "optimizer": {"lr": 2e-2},
    },
}
ADAPTER = "actor/lora_adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> SmallRun:
    """An uninterrupted run."""
    run = SmallRun(tmp_path_factory.mktemp("quiet"), tiny_model_dir, LORA, steps=STEPS)
    run.finish()
    run.check_whole()
    return run


def base_folder(run: SmallRun) -> Path:
    return run.job / "base_model" / "global_step_0" / "actor" / "huggingface"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def adapted(run: SmallRun, step: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base_folder(run), dtype=torch.float32)
    folder = run.job / f"global_step_{step}" / "actor" / "lora_adapter"
    return PeftModel.from_pretrained(model, str(folder)).eval()


def test_each_version_is_an_adapter_and_the_model_below_is_there_once_as_it_was(
    quiet: SmallRun, tiny_model_dir: Path
) -> None:
    base = sha256(base_folder(quiet) / "model.safetensors")
    state, own = (
        load_file(base_folder(quiet) / "model.safetensors"),
        load_file(tiny_model_dir / "model.safetensors"),
    )
    assert state.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
    found = {c.step: c for c in quiet.events("checkpoints", ev.Checkpoint)}
    assert sorted(found) == [0, 1, 2, 3]
    for step, event in found.items():
        assert (event.base_uri, event.base_digest) == (str(base_folder(quiet).parents[1]), base)
        assert event.digest == sha256(quiet.job / f"global_step_{step}" / ADAPTER)
        manifest = json.loads((Path(event.uri) / "manifest.json").read_text())
        assert manifest["base"] == {"uri": event.base_uri, "digest": base}
        assert manifest["files"][ADAPTER]["sha256"] == event.digest
        sizes = [p.stat().st_size for p in Path(event.uri).rglob("*") if p.is_file()]
        # matrices, two moments of each, and random states
        assert sum(sizes) < 160_000 < (base_folder(quiet) / "model.safetensors").stat().st_size
    files = {p.name for p in quiet.job.glob("global_step_*/actor/*")}
    assert "huggingface" not in files


def test_recorded_logprobs_are_those_of_pefts_model_at_each_version(quiet: SmallRun) -> None:
    """What explorers wrote under a version, computed again by peft over the same folder."""
    wrote = quiet.events("trajectories", ev.Trajectory)
    gaps: dict[int, float] = {}
    models = {step: adapted(quiet, step) for step in range(STEPS)}
    for trajectory in wrote:
        version = trajectory.min_policy_version
        for sequence in trajectory.sequences:
            tokens = torch.from_numpy(arrays.ints(sequence.tokens).astype(np.int64))
            mask = arrays.mask(sequence.loss_mask).astype(bool)
            with torch.no_grad():
                logits = models[version](input_ids=tokens[None]).logits[0, :-1]
            found = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()[mask[1:]]
            recorded = arrays.floats(sequence.logprobs)[mask]
            gaps[version] = max(gaps.get(version, 0.0), float(np.abs(found - recorded).max()))
    assert set(gaps) == {0, 1, 2}
    assert max(gaps.values()) < 1e-4
    steps = quiet.events("train_steps", ev.TrainStep)
    assert max(s.metrics["actor/logprob_gap_max"] for s in steps) < 1e-4
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        change = models[2](input_ids=ids).logits - models[0](input_ids=ids).logits
    assert change.abs().max() > 0.01, "the versions do not differ, so nothing was shown"


def test_a_run_killed_in_the_middle_ends_with_the_weights_of_a_quiet_one(
    quiet: SmallRun, small_run: Callable[..., SmallRun], tmp_path: Path
) -> None:
    run = small_run(LORA, steps=STEPS)
    marker = tmp_path / "killed"
    run.finish(STREAMRFT_KILL_AT=f"trainer.step_done@3={marker}")
    assert marker.exists()
    run.check_whole()
    assert run.final_digest() == quiet.final_digest()
    assert [p.name for p in (run.job / "base_model").glob("global_step_*")] == ["global_step_0"]


def test_conversion_makes_the_model_that_was_trained(
    quiet: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the recorded model, also of a copied job; where that is gone, of the one that is named."""
    job = Path(shutil.copytree(quiet.job, tmp_path / "job"))
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected = adapted(quiet, 3)(input_ids=ids).logits
    step, away = job / "global_step_3", tmp_path / "away"
    for word in ("converted", "present"):
        assert main(["convert", "-c", str(step)]) == 0
        assert word in capsys.readouterr().out
    check_model(step / "actor" / "huggingface", ids, expected)
    shutil.rmtree(step / "actor" / "huggingface")
    content = bytearray((step / ADAPTER).read_bytes())
    content[-1] ^= 1
    other = job / "global_step_2"
    (other / ADAPTER).write_bytes(content)
    assert main(["convert", "-c", str(other)]) == 1
    assert "the step's manifest says" in capsys.readouterr().err
    shutil.rmtree(job / "base_model")
    (quiet.job / "base_model").rename(away)
    try:
        assert main(["convert", "-c", str(step)]) == 1
        assert "Name the model that the training started from" in capsys.readouterr().err
        other = step / "actor" / "other"
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(quiet.model)).save_pretrained(
            other
        )
        assert main(["convert", "-c", str(step), "-b", str(other)]) == 0
        assert f"over {other}, whose model.safetensors is not" in capsys.readouterr().out
        shutil.rmtree(step / "actor" / "huggingface")
        assert main(["convert", "-c", str(step), "-b", str(quiet.model)]) == 0
    finally:
        away.rename(quiet.job / "base_model")
    check_model(step / "actor" / "huggingface", ids, expected)


def check_model(folder: Path, ids: torch.Tensor, expected: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (folder / "tokenizer.json").is_file()
