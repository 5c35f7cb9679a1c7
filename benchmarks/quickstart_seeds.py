"""The quickstart on several seeds: does the reward climb by learning from rewards, and how long.

Each seed gets another model, other rows and other sampling. Everything is read from the log.

    python benchmarks/quickstart_seeds.py [--seeds 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart"
CONFIG = EXAMPLE / "quickstart.yaml"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Result:
    """Rewards are means over 10 steps (all of them in a shorter run's halves)."""

    seed: int
    num_steps: int
    first: float
    last: float
    climb: float
    max_staleness: float
    max_logprob_gap: float
    run_s: float


def run_seed(seed: int, num_steps: int) -> Result:
    """Build, run, and read the log."""
    with tempfile.TemporaryDirectory() as root:
        os.environ |= {
            "QUICKSTART_ROOT": root,
            "QUICKSTART_SEED": str(seed),
            "QUICKSTART_STEPS": str(num_steps),
        }
        folder = f"{root}/quickstart"
        call(sys.executable, str(EXAMPLE / "build.py"), folder, "--seed", str(seed))
        begin = time.monotonic()
        call(*streamrft("run"), "--plain", "--plugin-dir", str(EXAMPLE / "plugins"))
        return read(seed, time.monotonic() - begin)


def streamrft(command: str) -> list[str]:
    """The command line of the product, from this interpreter."""
    return [sys.executable, "-m", "streamrft.deploy.cli", command, "--config", str(CONFIG)]


def call(*command: str) -> None:
    """Run to its end; what it printed is shown when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")


def read(seed: int, run_s: float) -> Result:
    """Fold the steps."""
    from streamrft.deploy.plan import plan

    report = runpy.run_path(str(EXAMPLE / "report.py"))
    run = plan(CONFIG, (str(EXAMPLE / "plugins"),))
    steps = report["steps_of"](run, run.stages[-1])
    rewards = [s.metrics["reward/mean"] for s in steps]
    window = max(1, min(report["WINDOW"], len(rewards) // 2))
    return Result(
        seed=seed,
        num_steps=len(steps),
        first=fmean(rewards[:window]),
        last=fmean(rewards[-window:]),
        climb=report["climb"](rewards),
        max_staleness=max(s.metrics["sample/staleness_max"] for s in steps),
        max_logprob_gap=max(s.metrics["actor/logprob_gap_max"] for s in steps),
        run_s=run_s,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, 10 steps")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seeds, steps = (1, 10) if arguments.quick else (arguments.seeds, 60)
    results = [run_seed(seed, steps) for seed in range(seeds)]
    if arguments.json:
        flat = {f"seed {r.seed} {k}": v for r in results for k, v in asdict(r).items()}
        print(json.dumps(flat))
        return
    print("seed  steps  first  last   climb  staleness  log-prob gap  seconds")
    for r in results:
        print(
            f"{r.seed:>4}  {r.num_steps:>5}  {r.first:.2f}   {r.last:.2f}   {r.climb:.2f}   "
            f"{r.max_staleness:>9.0f}  {r.max_logprob_gap:>12.1e}  {r.run_s:>7.0f}"
        )


if __name__ == "__main__":
    main()
