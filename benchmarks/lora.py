"""What an adapter saves: a training step of whole weights beside one of LoRA, and what each writes.

GRPO with KL to the reference on random tokens, float32; each in a process of its own. The peak is
the kernel's for the process, loading included; the seconds are CPU time of the second step. Sizes
are those of one full checkpoint: what explorers load, and optimiser and random state beside it.

    python benchmarks/lora.py [--quick] [--json] [--model FOLDER] [--rank N]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workers.batch import Group, our_group

NUM_SEQUENCES, LENGTH = 4, 256
NAMES = {"whole": "whole weights", "lora": "LoRA"}


def measure(model: str, who: str, rank: int, length: int) -> dict[str, float]:
    """One process: two steps and one checkpoint."""
    import numpy as np

    from streamrft.consumers.learning.learner import Learner
    from streamrft.consumers.settings import AlgorithmSettings, LoraSettings, TrainerSettings
    from streamrft.consumers.states import states_of

    lora = LoraSettings(rank=rank, alpha=rank) if who == "lora" else None
    settings = TrainerSettings(model, "unused", AlgorithmSettings(), num_threads=1, lora=lora)
    learner, random = Learner(settings, total_steps=None), np.random.default_rng(0)
    num_prompt, num_written = length // 4, length - length // 4
    prompt, *responses = (
        random.integers(10, 200, size).tolist()
        for size in (num_prompt, *[num_written] * NUM_SEQUENCES)
    )
    rewards = [float(i % 2) for i in range(NUM_SEQUENCES)]
    logprobs = [[-5.0] * num_written] * NUM_SEQUENCES
    batch = list(our_group(0, Group("", prompt, responses, rewards, logprobs)))
    learner.step(batch, step=1)
    began = time.process_time()
    learner.step(batch, step=2)
    seconds = time.process_time() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with tempfile.TemporaryDirectory() as folder:
        learner.save_hf(Path(folder, "weights"))
        Path(folder, "states", "actor").mkdir(parents=True)
        states_of(learner, 2, copies=False).write(Path(folder, "states"), "")
        weights_mb, states_mb = (_size_mb(Path(folder, n)) for n in ("weights", "states"))
    trained = sum(t.numel() for t in learner.state_dict().values())
    return {
        "trained_millions": trained / 1e6,
        "step_s": seconds,
        "peak_mb": peak_mb,
        "weights_mb": weights_mb,
        "states_mb": states_mb,
    }


def _size_mb(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="runs/gsm8k/model", help="folder made by smollm2.py")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--who", choices=NAMES, help="this one alone, in this process")
    args = parser.parse_args()
    if args.who:
        length = LENGTH // 4 if args.quick else LENGTH
        print(json.dumps(measure(args.model, args.who, args.rank, length)))
        return
    found = {}
    for who in NAMES:
        command = [sys.executable, __file__, *sys.argv[1:], "--who", who]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[who] = json.loads(done.stdout.splitlines()[-1])
    if args.json:
        rows = {f"{who}_{name}": value for who, row in found.items() for name, value in row.items()}
        print(json.dumps(rows))
        return
    print(f"{'':16}{'trained':>10}{'step':>9}{'peak':>11}{'weights':>12}{'states':>11}")
    for who, row in found.items():
        print(
            f"{NAMES[who]:16}{row['trained_millions']:8.1f} M{row['step_s']:7.2f} s"
            f"{row['peak_mb']:8,.0f} MB{row['weights_mb']:9,.1f} MB{row['states_mb']:8,.1f} MB"
        )


if __name__ == "__main__":
    main()
