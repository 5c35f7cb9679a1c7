"""Conversion of what Megatron-core itself saved (tests/support/megatron_save.py), without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrft.deploy.cli import main

DATA = Path(__file__).parents[1] / "data" / "megatron"
CASES = ("qwen2-untied-tp2-pp2", "llama-tied-tp2")


@pytest.fixture
def actor(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one save as `global_step_4/actor`."""
    return lambda case: Path(shutil.copytree(DATA / case, tmp_path / "global_step_4" / "actor"))


def convert(path: Path) -> int:
    return main(["convert", "--checkpoint-dir", str(path)])


def change_config(actor: Path, **values: object) -> Path:
    config = actor / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    return config


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_that_megatron_computed(
    actor: Callable[[str], Path], case: str
) -> None:
    folder = actor(case)
    assert convert(folder) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    found = model(torch.arange(37)[None]).logits
    expected = load_file(folder / "logits.safetensors")["logits"]
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_common_pt_is_never_opened(actor: Callable[[str], Path]) -> None:
    folder = actor(CASES[0])
    (folder / "dist_ckpt" / "common.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert convert(folder) == 0


def lost(folder: Path) -> Path:
    path = folder / "dist_ckpt" / "__1_1.distcp"
    path.unlink()
    return path


def without_metadata(folder: Path) -> Path:
    path = folder / "dist_ckpt" / ".metadata"
    path.unlink()
    return path


def zarr(folder: Path) -> Path:
    path = folder / "dist_ckpt" / "metadata.json"
    path.write_text(json.dumps({"sharded_backend": "zarr"}))
    return path


def other_heads(folder: Path) -> Path:
    return change_config(folder, num_key_value_heads=4)


def fewer_layers(folder: Path) -> Path:
    return change_config(folder, num_hidden_layers=1)


def larger_vocabulary(folder: Path) -> Path:
    return change_config(folder, vocab_size=49)


def other_width(folder: Path) -> Path:
    return change_config(folder, intermediate_size=23)


BREAKS = (
    lost, without_metadata, zarr, other_heads, fewer_layers, larger_vocabulary, other_width,
)  # fmt: skip


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.__name__)
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_ends_with_1_and_names_the_file(
    actor: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    case: str,
    broken: Callable[[Path], Path],
) -> None:
    folder = actor(case)
    path = broken(folder)
    before = sorted(folder.rglob("*"))
    assert convert(folder) == 1
    assert str(path) in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
