"""`streamrft convert` around the shards: critics, own checkpoints, whole models, killed runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_save import as_if_on_gpu
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from streamrft.consumers.checkpoints import CheckpointStore, Contents
from streamrft.consumers.convert import weights
from streamrft.consumers.convert.placing import held
from streamrft.deploy.cli import main
from streamrft.streams.blobs import sha256_file

IDS = torch.arange(11)[None]


def llama(kind: Callable[..., Any] = LlamaForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=11, initializer_range=0.4, bos_token_id=1,
        eos_token_id=2, dtype="float32",
    )  # fmt: skip
    return kind(LlamaConfig(**(options | changes)))


def save_shard(folder: Path, model: Any) -> Path:
    """One rank's shard with plain tensors, and the config beside it."""
    model.config.save_pretrained(folder / "huggingface")
    path = folder / "model_world_size_1_rank_0.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """The actor of a step with one shard."""
    folder = tmp_path / "job" / "global_step_1" / "actor"
    save_shard(folder, llama())
    return folder


def convert(path: Path, *words: object) -> int:
    return main(["convert", "-c", str(path), *map(str, words)])


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- critics


def test_a_critic_is_converted_on_request(actor: Path) -> None:
    critic = llama(LlamaForTokenClassification, num_labels=1)
    folder = actor.parent / "critic"
    save_shard(folder, critic)
    assert convert(actor.parent) == 0
    assert not (folder / "huggingface" / "model.safetensors").exists()
    assert convert(actor.parent, "--critic") == 0
    found = AutoModelForTokenClassification.from_pretrained(folder / "huggingface")
    assert torch.equal(found.eval()(IDS).logits, critic.eval()(IDS).logits)


def test_critics_of_a_job_are_those_of_the_steps_that_have_one(
    actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, served = actor.parent.parent, actor.parent.parent / "global_step_4"
    shutil.copytree(actor.parent, served)
    assert convert(job, "--critic") == 1
    assert capsys.readouterr().err.endswith("no step has a critic. Leave out --critic.\n")
    save_shard(actor.parent / "critic", llama(LlamaForTokenClassification, num_labels=1))
    assert convert(job, "--critic") == 0
    assert (actor.parent / "critic/huggingface/model.safetensors").exists()
    assert not (served / "critic").exists()
    assert convert(served, "--critic") == 1


def test_a_path_inside_the_critic_means_the_critic(actor: Path) -> None:
    folder = actor.parent / "critic"
    save_shard(folder, llama(LlamaForTokenClassification, num_labels=1))
    assert convert(folder) == 0
    assert (folder / "huggingface" / "model.safetensors").exists()
    assert not (actor / "huggingface" / "model.safetensors").exists()


# --- what needs no conversion


def own_checkpoint(folder: Path) -> Path:
    """A checkpoint as the trainer writes it; its Hugging Face folder."""

    def write_model(hf: Path) -> str:
        llama().save_pretrained(hf)
        return sha256_file(hf / "model.safetensors")

    saved = CheckpointStore(str(folder), "main").save(Contents(write_model), step=3, epoch=1)
    return Path(saved.uri) / "actor" / "huggingface"


def test_the_trainers_own_checkpoint_is_there_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint(tmp_path)
    before = names(folder)
    assert convert(tmp_path) == 0
    assert "present (saved as a Hugging Face folder)" in capsys.readouterr().out
    assert names(folder) == before


def test_the_trainers_own_checkpoint_that_is_cut_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert convert(tmp_path) == 1
    assert str(path) in capsys.readouterr().err


def test_a_whole_model_beside_the_shards_is_kept(actor: Path) -> None:
    other = llama()
    other.model.norm.weight.data.fill_(3.0)
    other.save_pretrained(actor / "huggingface")
    assert convert(actor) == 0
    found = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert found.model.norm.weight.eq(3).all()


def test_a_cut_model_beside_the_shards_is_made_anew(actor: Path) -> None:
    llama().save_pretrained(actor / "huggingface")
    path = actor / "huggingface" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert convert(actor) == 0
    found = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert torch.equal(found(IDS).logits, llama()(IDS).logits)


def test_a_cut_model_without_shards_ends_with_1(
    actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (actor / "model_world_size_1_rank_0.pt").unlink()
    llama().save_pretrained(actor / "huggingface")
    path = actor / "huggingface" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert convert(actor) == 1
    assert str(path) in capsys.readouterr().err


def test_a_folder_without_anything_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path) == 1
    assert "no global_step_N lies there" in capsys.readouterr().err
    assert convert(tmp_path / "nowhere") == 1
    (tmp_path / "global_step_1").mkdir()
    assert convert(tmp_path) == 1
    assert "holds no shards" in capsys.readouterr().err


def test_a_folder_of_shards_alone_is_converted(actor: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(actor, tmp_path / "elsewhere"))
    assert convert(folder) == 0
    assert (folder / "huggingface" / "model.safetensors").exists()


def test_what_was_converted_stays_when_its_shards_are_deleted(actor: Path) -> None:
    assert convert(actor) == 0
    (actor / "model_world_size_1_rank_0.pt").unlink()
    assert convert(actor) == 0


def test_a_tokenizer_is_added_to_what_was_converted_without(actor: Path, tmp_path: Path) -> None:
    assert convert(actor) == 0
    base = Path(shutil.copytree(actor / "huggingface", tmp_path / "base"))
    (base / "tokenizer.json").write_text("{}")
    assert convert(actor, "-b", base) == 0
    assert (actor / "huggingface" / "tokenizer.json").read_text() == "{}"


# --- shapes of files


def test_a_large_model_gets_several_files_and_an_index(
    actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 1000)
    assert convert(actor) == 0
    assert "model.safetensors.index.json" in names(actor / "huggingface")
    found = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert torch.equal(found(IDS).logits, llama()(IDS).logits)


def test_a_shard_saved_on_a_gpu_needs_none(actor: Path) -> None:
    as_if_on_gpu(actor / "model_world_size_1_rank_0.pt")
    assert convert(actor) == 0
    found = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    assert torch.equal(found(IDS).logits, llama()(IDS).logits)


def test_names_that_wrappers_lengthen_are_known(actor: Path) -> None:
    state = {f"_orig_mod.{n}": t for n, t in llama().state_dict().items()}
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    assert convert(actor) == 0


def test_buffers_that_old_versions_saved_do_not_matter(actor: Path) -> None:
    state = llama().state_dict() | {"model.rotary_emb.inv_freq": torch.ones(2)}
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    assert convert(actor) == 0


def test_an_adapter_ends_with_1(actor: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"{prefix}.{n}": torch.ones(2, 2) for n in names}
    path = actor / "model_world_size_1_rank_0.pt"
    torch.save(state, path)
    assert convert(actor) == 1
    err = capsys.readouterr().err
    assert str(path) in err and "belongs to an adapter" in err


def test_shards_of_two_saves_end_with_1_unless_one_is_named(
    actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        torch.save({}, actor / f"model_world_size_2_rank_{rank}.pt")
    assert convert(actor) == 1
    assert "holds shards of 1 and 2 ranks" in capsys.readouterr().err
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    assert convert(actor) == 0


# --- interrupted


def test_a_full_disk_ends_with_1_and_leaves_nothing(
    actor: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(actor), names(actor / "huggingface")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert convert(actor) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert (names(actor), names(actor / "huggingface")) == before


def test_what_a_killed_conversion_left_is_cleared_up(actor: Path) -> None:
    (actor / "huggingface.converting").mkdir()
    (actor / "huggingface.converting" / "model.safetensors").write_bytes(b"half")
    (actor / "huggingface").rename(actor / "huggingface.replaced")
    assert convert(actor) == 0
    assert names(actor) == ["huggingface", "model_world_size_1_rank_0.pt"]


def test_two_conversions_of_one_model_exclude_each_other(
    actor: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(actor):
        assert convert(actor) == 1
    assert "is being converted by another process" in capsys.readouterr().err
    assert convert(actor) == 0
