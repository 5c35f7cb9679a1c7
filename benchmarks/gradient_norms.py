"""Whether a step's gradient is TRL's: its norm, ours beside that of TRL's trainers, on one batch.

SmolLM2-135M, real text of mixed lengths, recorded log-probs off by 0.15 a token so that ratios are
clipped on both sides, rewards of a group. TRL's trainers run their own loop, loss and collation;
only generation gives what is in the batch. What is set alike: float32 (TRL's default is bfloat16
with checkpointing), clip 0.2 without our dual clip, no KL to a reference, a group's deviation +
1e-4, beta 0.1. Exits with 1 where a norm differs by more than 1e-3 of it.

    python benchmarks/gradient_norms.py [--quick] [--json] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from workers.contenders import contenders, prepare

TOLERANCE = 1e-3
KINDS = {
    "grpo": "GRPO, mean over tokens (TRL's dapo)",
    "entropy": "GRPO, mean over sequences, entropy term",
    "dpo": "DPO, sigmoid",
}


def measure(folder: Path, kind: str) -> dict[str, float]:
    """Norms of the first step's gradient, and their relative difference."""
    with contenders(kind, ["ours", "trl"], folder, num_threads=1, rows=1) as both:
        found = {one.who: one.step()["grad_norm"] for one in both}
    return found | {"difference": abs(found["ours"] - found["trl"]) / found["trl"]}


def main() -> int:
    """Print the table, or one object; 1 where a norm is not TRL's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, short responses")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="runs/gsm8k/model", help="folder made by smollm2.py")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(args.model, Path(folder), is_quick=args.quick)
        for kind in KINDS:
            rows[kind] = measure(Path(folder), kind)
    if args.json:
        print(json.dumps(rows))
    else:
        print(f"{'gradient norm':42}{'ours':>12}{'TRL':>12}{'difference':>12}")
        for kind, row in rows.items():
            norms = f"{row['ours']:12.6f}{row['trl']:12.6f}{row['difference']:12.1e}"
            print(f"{KINDS[kind]:42}{norms}")
    return int(any(not row["difference"] <= TOLERANCE for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
