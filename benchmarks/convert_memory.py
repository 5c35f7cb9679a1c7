"""Peak memory of `streamrft convert` over its largest shard, for a model of SmolLM2-135M's shape.

Random weights in float32, saved by FSDP2 ranks on gloo, as shards and as a DCP folder. The peak is
the kernel's for the whole process; the interpreter is a process with the same imports.

    python benchmarks/convert_memory.py [--quick] [--json] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
IMPORTS = "import torch, transformers.models.llama.modeling_llama"


def save(folder: Path, num_ranks: int) -> None:
    """Fork the ranks; step 1 of `folder` gets shards, step 2 a DCP folder."""
    import torch.multiprocessing as mp

    for step in (1, 2):
        (folder / f"global_step_{step}" / "actor" / "huggingface").mkdir(parents=True)
    mp.start_processes(save_rank, (num_ranks, folder), nprocs=num_ranks, start_method="fork")


def save_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """One rank of the save."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    actors = [folder / f"global_step_{step}" / "actor" for step in (1, 2)]
    torch.save(state, actors[0] / f"model_world_size_{num_ranks}_rank_{rank}.pt")
    dcp.save({"model": state}, checkpoint_id=actors[1] / "dcp")
    if rank == 0:
        for actor in actors:
            model.config.save_pretrained(actor / "huggingface")
    dist.destroy_process_group()


def peak_mb(*command: str) -> tuple[float, float]:
    """Peak resident MB and seconds of a process. This one stays small: a child inherits its peak.

    Raises:
        SystemExit: the process failed.
    """
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return usage.ru_maxrss * 1024 / 1e6, time.perf_counter() - started


def measure(folder: Path, num_ranks: int, interpreter_mb: float) -> list[dict[str, Any]]:
    """One row for the shards, one for the DCP folder."""
    job = folder / f"ranks{num_ranks}"
    subprocess.run([sys.executable, __file__, "--save", str(job), str(num_ranks)], check=True)
    rows = []
    for step, kind in ((1, "FSDP shards"), (2, "DCP folder")):
        actor = job / f"global_step_{step}" / "actor"
        files = [p for p in actor.rglob("*") if p.suffix in (".pt", ".distcp")]
        shard_mb = max(p.stat().st_size for p in files) / 1e6
        program = ("-m", "streamrft.deploy.cli", "convert", "-c", str(actor))
        peak, seconds = peak_mb(sys.executable, *program)
        weights = actor / "huggingface" / "model.safetensors"
        rows.append({
            "name": f"{kind}, {num_ranks} ranks", "model_mb": weights.stat().st_size / 1e6,
            "shard_mb": shard_mb, "peak_mb": peak, "interpreter_mb": interpreter_mb,
            "ratio": (peak - interpreter_mb) / shard_mb, "seconds": seconds,
        })  # fmt: skip
    return rows


def main() -> None:
    """Print a table, or one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one and two ranks only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help="for the saves, 2 GB (default: a temporary one)")
    parser.add_argument("--save", nargs=2, metavar=("FOLDER", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        save(Path(args.save[0]), int(args.save[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        interpreter_mb, _ = peak_mb(sys.executable, "-c", IMPORTS)
        for num_ranks in (1, 2) if args.quick else (1, 2, 3):
            rows += measure(Path(folder), num_ranks, interpreter_mb)
    if args.json:
        print(json.dumps({row.pop("name"): row for row in rows}))
        return
    print(f"{'':24}{'model':>9}{'shard':>9}{'peak':>9}{'python':>9}{'ratio':>8}{'seconds':>9}")
    for row in rows:
        mb = "".join(
            f"{row[k]:6,.0f} MB" for k in ("model_mb", "shard_mb", "peak_mb", "interpreter_mb")
        )
        print(f"{row['name']:24}{mb}{row['ratio']:8.2f}{row['seconds']:9.1f}")


if __name__ == "__main__":
    main()
