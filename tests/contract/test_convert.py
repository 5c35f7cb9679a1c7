"""`streamrft convert` over shards that torch itself wrote: FSDP2 and DCP, on one to three ranks."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sharded_save import DTYPES, HEADS, WORLD_SIZES, as_if_on_gpu
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from streamrft.deploy.cli import main

SAVER = Path(__file__).parents[1] / "support" / "sharded_save.py"
IDS = torch.arange(37)[None]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every save of sharded_save.py; made once, never changed."""
    folder = tmp_path_factory.mktemp("saves")
    done = subprocess.run(
        [sys.executable, str(SAVER), str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def job(saves: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of one model's saves on `world_size` ranks: step 1 is shards, step 2 is DCP."""

    def copy(model: str = "untied-float32", world_size: int = 3) -> Path:
        return Path(shutil.copytree(saves / model / f"w{world_size}", tmp_path / "job"))

    return copy


def convert(path: Path, *words: object) -> int:
    return main(["convert", "-c", str(path), *map(str, words)])


def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def hf(job: Path, step: int = 1) -> Path:
    return job / f"global_step_{step}" / "actor" / "huggingface"


def shard(job: Path, rank: int) -> Path:
    return job / "global_step_1" / "actor" / f"model_world_size_3_rank_{rank}.pt"


def dcp(job: Path) -> Path:
    return job / "global_step_2" / "actor" / "dcp"


def tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_the_converted_folder_has_the_logits_of_the_model(
    saves: Path, job: Callable[..., Path], head: str, dtype: str, world_size: int
) -> None:
    folder = job(f"{head}-{dtype}", world_size)
    assert convert(folder) == 0
    expected = logits(saves / f"{head}-{dtype}" / "base")
    for step in (1, 2):
        found = logits(hf(folder, step))
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found, expected)
        assert not list(hf(folder, step).parent.glob("huggingface.*"))


@pytest.mark.parametrize("mesh", ["hsdp", "tp"])
def test_shards_of_a_mesh_of_two_dimensions_are_put_together(
    saves: Path, tmp_path: Path, mesh: str
) -> None:
    folder = Path(shutil.copytree(saves / "tied-float32" / mesh, tmp_path / "job"))
    assert convert(folder) == 0
    assert torch.equal(logits(hf(folder)), logits(saves / "tied-float32" / "base"))


def test_sharded_tensors_saved_on_gpus_need_none(saves: Path, job: Callable[..., Path]) -> None:
    folder = job()
    for rank in range(3):
        as_if_on_gpu(shard(folder, rank))
    assert convert(folder, "-s", 1) == 0
    assert torch.equal(logits(hf(folder)), logits(saves / "untied-float32" / "base"))


# --- what is asked for


@pytest.mark.parametrize(
    "inside", ["", "global_step_1", "global_step_1/actor", "global_step_1/actor/huggingface"]
)
def test_any_path_inside_a_step_means_that_step(job: Callable[..., Path], inside: str) -> None:
    folder = job()
    assert convert(folder / inside) == 0
    assert (hf(folder, 2) / "model.safetensors").exists() == (inside == "")
    assert (hf(folder, 1) / "model.safetensors").exists()


def test_a_shard_means_its_step_and_step_leads_to_another(job: Callable[..., Path]) -> None:
    folder = job()
    assert convert(shard(folder, 2), "--step", 2) == 0
    assert not (hf(folder, 1) / "model.safetensors").exists()
    assert convert(shard(folder, 2)) == 0
    assert (hf(folder, 1) / "model.safetensors").exists()


def test_a_step_that_is_not_there_ends_with_1(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job()
    assert convert(folder, "-s", 1, 7) == 1
    assert "step 7 is not there; found 1, 2" in capsys.readouterr().err
    assert not (hf(folder, 1) / "model.safetensors").exists()


def test_an_object_store_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "-c", "s3://bucket/job"]) == 1
    told = capsys.readouterr().err
    assert "s3://bucket/job: an object store is not read. Copy the step to a disk" in told


def test_a_critic_that_was_asked_for_and_is_not_there_ends_with_1(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job()
    assert convert(folder, "-s", 1, "--critic") == 1
    assert "global_step_1/critic: is not there; this step has no critic" in capsys.readouterr().err
    assert (hf(folder) / "model.safetensors").exists()


def test_the_second_conversion_opens_no_weights(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job()
    assert convert(folder) == 0
    before = tree(folder)
    for step in (1, 2):
        weights = hf(folder, step) / "model.safetensors"
        weights.write_bytes(b"\0" * weights.stat().st_size)
    capsys.readouterr()
    assert convert(folder) == 0
    assert capsys.readouterr().out.count("present (as manifest.json says)") == 2
    assert tree(folder).keys() == before.keys()


def test_shards_that_were_saved_anew_are_converted_anew(job: Callable[..., Path]) -> None:
    folder = job()
    assert convert(folder, "-s", 1) == 0
    before = (hf(folder) / "manifest.json").read_bytes()
    for rank in range(3):
        state = torch.load(shard(folder, rank), weights_only=False)
        state["model.norm.weight"]._local_tensor.fill_(2.0)
        torch.save(state, shard(folder, rank))
    assert convert(folder, "-s", 1) == 0
    assert (hf(folder) / "manifest.json").read_bytes() != before
    assert load_file(hf(folder) / "model.safetensors")["model.norm.weight"].eq(2).all()


def test_dtype_casts_the_weights_and_says_so_in_the_config(job: Callable[..., Path]) -> None:
    folder = job()
    assert convert(folder, "-s", 1) == 0
    kept = load_file(hf(folder) / "model.safetensors")
    assert convert(folder, "-s", 1, "--dtype", "bfloat16") == 0
    cast = load_file(hf(folder) / "model.safetensors")
    assert all(torch.equal(cast[n], t.bfloat16()) for n, t in kept.items())
    assert json.loads((hf(folder) / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_base_model_gives_what_the_checkpoint_lacks(
    saves: Path, job: Callable[..., Path], tmp_path: Path
) -> None:
    folder = job()
    base = Path(shutil.copytree(saves / "untied-float32" / "base", tmp_path / "base"))
    (base / "tokenizer.json").write_text("{}")
    shutil.rmtree(hf(folder))
    assert convert(folder, "-s", 1) == 1
    assert convert(folder, "-s", 1, "--base-model-dir", base) == 0
    assert (hf(folder) / "tokenizer.json").read_text() == "{}"
    assert torch.equal(logits(hf(folder)), logits(base))


def test_one_failure_does_not_keep_the_other_steps_from_it(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job()
    shard(folder, 1).unlink()
    assert convert(folder) == 1
    out, err = capsys.readouterr()
    assert str(shard(folder, 1)) in err
    assert "global_step_2" in out and (hf(folder, 2) / "model.safetensors").exists()


# --- plain shards


def plain(folder: Path, cut: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Replace the shards by three of plain tensors, each what `cut` gives of the whole one."""
    whole = load_file(folder.parent / "base" / "model.safetensors")
    for rank in range(3):
        torch.save({n: cut(t, rank).clone() for n, t in whole.items()}, shard(folder, rank))


CUTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda tensor, rank: tensor.tensor_split(3)[rank],
    "flattened": lambda tensor, rank: tensor.reshape(-1).tensor_split(3)[rank],
    "copies": lambda tensor, rank: tensor,
}


@pytest.mark.parametrize("way", CUTS)
def test_plain_shards_are_rows_stretches_or_copies(
    saves: Path, job: Callable[..., Path], way: str
) -> None:
    folder = job()
    shutil.copytree(saves / "untied-float32" / "base", folder.parent / "base")
    plain(folder, CUTS[way])
    assert convert(folder, "-s", 1) == 0
    assert torch.equal(logits(hf(folder)), logits(folder.parent / "base"))


# --- what is broken


class Touch:
    """A pickle of it makes a file wherever it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def missing_rank(job: Path, saves: Path) -> Path:
    shard(job, 1).unlink()
    return shard(job, 1)


def cut_shard(job: Path, saves: Path) -> Path:
    content = shard(job, 2).read_bytes()
    shard(job, 2).write_bytes(content[: len(content) * 2 // 3])
    return shard(job, 2)


def empty_shard(job: Path, saves: Path) -> Path:
    shard(job, 0).write_bytes(b"")
    return shard(job, 0)


def wrong_base(job: Path, saves: Path) -> Path:
    config = hf(job) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"num_hidden_layers": 3}))
    return config


def wrong_width(job: Path, saves: Path) -> Path:
    config = hf(job) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"vocab_size": 36}))
    return config


def wrongly_tied(job: Path, saves: Path) -> Path:
    config = hf(job) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    return config


def running_shard(job: Path, saves: Path) -> Path:
    torch.save({"model.norm.weight": Touch(job / "ran")}, shard(job, 1))
    return shard(job, 1)


def lost_dcp_file(job: Path, saves: Path) -> Path:
    path = dcp(job) / "__1_0.distcp"
    path.unlink()
    return path


def cut_dcp_file(job: Path, saves: Path) -> Path:
    path = dcp(job) / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])
    return path


def cut_metadata(job: Path, saves: Path) -> Path:
    path = dcp(job) / ".metadata"
    path.write_bytes(path.read_bytes()[:500])
    return path


def running_metadata(job: Path, saves: Path) -> Path:
    path = dcp(job) / ".metadata"
    path.write_bytes(pickle.dumps(Touch(job / "ran")))
    return path


def running_chunk(job: Path, saves: Path) -> Path:
    """A pickle with code in the place of a tensor, of exactly its length."""
    metadata = FileSystemReader(dcp(job)).read_metadata()
    index, place = next(
        (i, s)
        for i, s in metadata.storage_data.items()
        if i.fqn == "app.model.model.embed_tokens.weight"
    )
    buffer = BytesIO()
    torch.save(Touch(job / "ran"), buffer)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"."
    room = place.length - len(buffer.getvalue())
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"." * (room + 1)
    content = buffer.getvalue()
    assert len(content) == place.length
    path = dcp(job) / place.relative_path
    whole = bytearray(path.read_bytes())
    whole[place.offset : place.offset + place.length] = content
    path.write_bytes(whole)
    return path


BREAKS: dict[Callable[[Path, Path], Path], int] = {
    missing_rank: 1, cut_shard: 1, empty_shard: 1, wrong_base: 1, wrong_width: 1, wrongly_tied: 1,
    running_shard: 1, lost_dcp_file: 2, cut_dcp_file: 2, cut_metadata: 2, running_metadata: 2,
    running_chunk: 2,
}  # fmt: skip


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.__name__)
def test_what_is_broken_ends_with_1_names_the_file_and_leaves_nothing(
    saves: Path, job: Callable[..., Path], capsys: pytest.CaptureFixture[str], broken: Any
) -> None:
    folder = job()
    path = broken(folder, saves)
    before = tree(folder)
    assert convert(folder, "-s", BREAKS[broken]) == 1
    out, err = capsys.readouterr()
    assert str(path) in err and not out
    assert tree(folder).keys() == before.keys(), "nothing new, and no code ran"
    if broken.__name__.startswith("running"):
        assert "its pickle asks for" in err and "nothing of it was run" in err


def test_another_base_than_the_checkpoints_own_model_is_refused(
    saves: Path, job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job()
    base = Path(shutil.copytree(saves / "untied-float32" / "base", tmp_path / "base"))
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"hidden_size": 24}))
    assert convert(folder, "-s", 1, "-b", base) == 1
    assert str(base / "config.json") in capsys.readouterr().err
