"""A small configuration and what is planned of it with changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from streamrft.deploy.config.load import merged
from streamrft.deploy.plan import Run, plan

BASE: dict[str, Any] = {
    "project": "p",
    "name": "n",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "m", "max_model_len": 512},
    "buffer": {
        "batch_size": 8,
        "explorer_input": {"taskset": {"name": "rows", "path": "rows.jsonl"}},
    },
    "explorer": {"rollout_model": {"engine_type": "transformers"}},
}


def with_changes(changes: dict[str, Any]) -> dict[str, Any]:
    return merged(copy.deepcopy(BASE), changes)


def planned(tmp_path: Path, changes: dict[str, Any] | None = None) -> Run:
    path = tmp_path / "run.yaml"
    config = with_changes({"checkpoint_root_dir": str(tmp_path / "runs")} | (changes or {}))
    path.write_text(json.dumps(config))
    return plan(path)
