"""Saves small Llamas as FSDP2 shards and DCP folders: `python sharded_save.py FOLDER`.

One process imports torch once; the ranks are its forks, so that a save of three ranks is quick.
`FOLDER/<head>-<dtype>/base` is the model, `.../w<W>/global_step_1` its shards, `..._2` its DCP.
`FOLDER/tied-float32/{hsdp,tp}/global_step_1` are shards of four ranks in a mesh of 2 x 2.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, DTYPES, WORLD_SIZES = ("tied", "untied"), ("float32", "bfloat16"), (1, 2, 3)


def make_model(head: str, dtype: str) -> LlamaForCausalLM:
    """37 rows of vocabulary and 4 of keys, so that three ranks get uneven and empty pieces."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=20, intermediate_size=26, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, vocab_size=37, tie_word_embeddings=head == "tied",
        initializer_range=0.4, bos_token_id=1, eos_token_id=2, dtype=dtype,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


def save_rank(rank: int, world_size: int, folder: Path) -> None:
    """One rank: shard, save both ways."""
    store = dist.FileStore(str(folder / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for head in HEADS:
        for dtype in DTYPES:
            model: Any = make_model(head, dtype)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            state = model.state_dict()
            job = folder / f"{head}-{dtype}" / f"w{world_size}"
            shards = job / "global_step_1" / "actor"
            torch.save(state, shards / f"model_world_size_{world_size}_rank_{rank}.pt")
            app = {"model": state, "optim": {"step": torch.ones(3)}, "num_steps": 7}
            dcp.save({"app": app}, checkpoint_id=job / "global_step_2" / "actor" / "dcp")
    dist.destroy_process_group()


def save_mesh_rank(rank: int, folder: Path) -> None:
    """One of four ranks: two copies of two shards, and tensor parallelism within two shards."""
    store = dist.FileStore(str(folder / "store-mesh"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    for kind, names in (("hsdp", ("ddp", "fsdp")), ("tp", ("fsdp", "tp"))):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model: Any = make_model("tied", "float32")
        for layer in model.model.layers:
            if kind == "tp":
                plan = {"gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
                parallelize_module(layer.mlp, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh if kind == "hsdp" else mesh["fsdp"])
        fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["fsdp"])
        shards = folder / "tied-float32" / kind / "global_step_1" / "actor"
        torch.save(model.state_dict(), shards / f"model_world_size_4_rank_{rank}.pt")
    dist.destroy_process_group()


def as_if_on_gpu(path: Path) -> None:
    """Change what a shard says of its tensors' device from cpu to cuda:0."""
    with zipfile.ZipFile(path) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    (name,) = (n for n in entries if n.endswith("/data.pkl"))
    cpu, gpu = b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0"
    assert cpu in entries[name]
    entries[name] = entries[name].replace(cpu, gpu)
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)


def main(folder: Path) -> None:
    for head in HEADS:
        for dtype in DTYPES:
            base = folder / f"{head}-{dtype}" / "base"
            make_model(head, dtype).save_pretrained(base)
            jobs = [f"w{w}/global_step_{n}" for w in WORLD_SIZES for n in (1, 2)]
            for path in (f"{j}/actor" for j in (*jobs, "hsdp/global_step_1", "tp/global_step_1")):
                hf = base.parent / path / "huggingface"
                hf.mkdir(parents=True)
                (hf / "config.json").write_bytes((base / "config.json").read_bytes())
    mp.start_processes(save_mesh_rank, (folder,), nprocs=4, start_method="fork")
    for world_size in WORLD_SIZES:
        mp.start_processes(save_rank, (world_size, folder), nprocs=world_size, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
