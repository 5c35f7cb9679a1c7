"""What of torch holds for a whole process, so that a run can be repeated."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..settings import TrainerSettings


def prepare_torch(settings: TrainerSettings) -> None:
    """Seed, threads where settings name a number, and in deterministic mode its algorithms."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # filling every new tensor with NaN is a debugging aid that costs time
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
