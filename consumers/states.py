"""What a resume needs beside the weights: optimiser and random state, as files or as copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .learning.learner import Learner

OPTIMIZER_FILE = "optim_world_size_1_rank_0.pt"
EXTRA_FILE = "extra_state_world_size_1_rank_0.pt"


@dataclass(frozen=True)
class States:
    """Optimiser and random state of one moment."""

    optimizer: dict[str, Any]
    rng: dict[str, Any]

    @classmethod
    def of(cls, learner: Learner) -> States:
        """The learner's own tensors: good until its next step."""
        return cls(learner.optimizer_state(), learner.rng_state())

    def copied(self) -> States:
        """The same values in memory of their own, whatever the learner does next."""
        return States(copied(self.optimizer), copied(self.rng))

    def write(self, folder: Path) -> None:
        """Fill the folder `actor/`; both files load with weights_only=True. Raises OSError."""
        import torch

        try:
            torch.save(self.optimizer, folder / OPTIMIZER_FILE)
            torch.save({"rng": self.rng}, folder / EXTRA_FILE)
        except RuntimeError as error:  # torch's own file writer says so when the disk is full
            raise OSError(f"{folder}: {error}") from error


def copied(value: Any) -> Any:
    """Nested dictionaries and lists with every tensor copied to the CPU."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(inner) for inner in value)
    return value
