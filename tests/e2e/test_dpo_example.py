"""The commands of the example's page, as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "dpo_pairs" / "README.md"


def test_the_page_trains_a_policy_that_prefers_what_was_chosen(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python = {
        "python": [sys.executable],
        "streamrft": [sys.executable, "-m", "streamrft.deploy.cli"],
    }
    environment = {k: v for k, v in os.environ.items() if k != "EXAMPLE_ROOT"}
    for line in block.splitlines():
        program, *words = line.split()
        done = subprocess.run(
            [*python[program], *words], cwd=tmp_path, capture_output=True, text=True,
            timeout=480, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    step = json.loads(done.stdout)
    metrics = step.get("event", step)["metrics"]
    assert metrics["actor/reward_accuracy"] > 0.9 and metrics["actor/reward_margin"] > 0.3
    (named,) = re.findall(r"`(runs/dpo_pairs/digits/prefer/\S+)`", PAGE.read_text())
    assert (tmp_path / named / "model.safetensors").exists()
