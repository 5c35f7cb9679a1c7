"""What a training step costs: ours beside TRL's and beside the bare model, in the same run.

SmolLM2-135M on a CPU in float32, one batch of real text with 147 to 611 tokens a sequence, the
same tokens, thread count and AdamW for all, each in a process of its own; steps are taken in turn.
TRL's trainers run their own loop with the batch in place of generation, in micro-batches of one
sequence (or pair), where they were fastest and smallest. Entropies are in the loss on both sides or
left out on both. The bare model passes each sequence alone forward and backward: no padding, no
loss but a cross entropy, no optimiser. DPO's reference passes forward in all three.

A step's cost is the CPU time of its process (with --threads above 1: the time on the clock), the
first step of each is not counted. The peak is the kernel's for the whole process and all its steps.

    python benchmarks/train_step.py [--quick] [--json] [--model FOLDER] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from workers.batch import Batch
from workers.contenders import contenders, prepare

NAMES = {"bare": "bare model", "ours": "streamrft", "trl": "TRL"}
KINDS = {"grpo": "GRPO", "entropy": "GRPO with an entropy term", "dpo": "DPO"}
Row = dict[str, float]


def measure(folder: Path, batch: Batch, kind: str, num_rounds: int, num_threads: int) -> Row:
    """Medians of tokens a second and peaks by process, and ratios within a round.

    Of several rounds the first is not counted.
    """
    sequences = batch.sequences("dpo" if kind == "dpo" else "grpo")
    num_tokens = sum(len(prompt) + len(response) for prompt, response in sequences)
    clock = "cpu_s" if num_threads == 1 else "seconds"
    with contenders(kind, list(NAMES), folder, num_threads=num_threads, rows=1) as all_of_them:
        rounds = [{c.who: c.step() for c in all_of_them} for _ in range(num_rounds)]
        peaks = {c.who: c.peak_mb() for c in all_of_them}
    rates = [{who: num_tokens / r[who][clock] for who in NAMES} for r in rounds[1:] or rounds]
    found: Row = {"num_tokens": num_tokens}
    for who in NAMES:
        found[f"{who}_tokens_per_s"] = statistics.median(r[who] for r in rates)
        found[f"{who}_peak_mb"] = peaks[who]
    for other in ("trl", "bare"):
        ratios = [r["ours"] / r[other] for r in rates]
        found[f"speed_over_{other}"] = statistics.median(ratios)
        found[f"speed_over_{other}_low"] = min(ratios)
        found[f"speed_over_{other}_high"] = max(ratios)
        found[f"memory_over_{other}"] = peaks["ours"] / peaks[other]
    return found


def show(kind: str, row: Row) -> None:
    """The rows of one kind."""
    for who, name in NAMES.items():
        rate, peak = row[f"{who}_tokens_per_s"], row[f"{who}_peak_mb"]
        line = f"{KINDS[kind]:27}{name:12}{rate:10,.0f}{peak:10,.0f} MB"
        if who != "ours":
            low, high = row[f"speed_over_{who}_low"], row[f"speed_over_{who}_high"]
            ratio = f"{row[f'speed_over_{who}']:.2f} ({low:.2f} to {high:.2f})"
            line += f"{ratio:>24}{row[f'memory_over_{who}']:12.2f}"
        print(line)


def main() -> None:
    """Print the table, or one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, short responses")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="runs/gsm8k/model", help="folder made by smollm2.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    args = parser.parse_args()
    num_rounds = 1 if args.quick else args.rounds
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = prepare(args.model, folder, is_quick=args.quick)
        for kind in args.kinds.split(","):
            rows[kind] = measure(folder, batch, kind, num_rounds, args.threads)
    if args.json:
        print(json.dumps(rows | {"load": {"1m": os.getloadavg()[0]}}))
        return
    print(f"load {os.getloadavg()[0]:.0f}, {args.threads} threads, rounds: {num_rounds}")
    head = f"{'':39}{'tokens/s':>10}{'peak':>13}"
    print(f"{head}{'streamrft is faster by':>24}{'its memory':>12}")
    for kind, row in rows.items():
        show(kind, row)


if __name__ == "__main__":
    main()
