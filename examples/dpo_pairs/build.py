"""Make what the example needs: the quickstart's tiny model, rows to imitate, and pairs."""

from __future__ import annotations

import argparse
import json
import random
import runpy
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "build.py"


def build(folder: Path) -> None:
    """Fill `folder`, unless an earlier call did."""
    if (folder / "pairs.jsonl").exists():
        print(f"{folder} is already there: the run goes on. Remove it to begin anew.")
        return
    quickstart = runpy.run_path(str(QUICKSTART))
    quickstart["save_model"](folder / "model", seed=0)
    quickstart["write_rows"](folder / "rows.jsonl", 20 * 64, random.Random("rows"))
    write_pairs(folder / "pairs.jsonl", 10 * 32, random.Random("pairs"))
    print(f"{folder}: a random model of 0.4 million parameters, rows and pairs")


def write_pairs(path: Path, count: int, rng: random.Random) -> None:
    """JSON lines with `prompt`, `chosen` (sorted) and `rejected` (the same digits otherwise)."""
    with path.open("w") as out:
        for _ in range(count):
            digits = rng.sample("0123456789", 4)
            row = {"prompt": f"sort {''.join(digits)}", "chosen": "".join(sorted(digits))}
            row["rejected"] = "".join(sorted(digits, reverse=True))
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/dpo_pairs"))
    build(parser.parse_args().folder)
