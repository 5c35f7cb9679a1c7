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
        write_tensors(self.optimizer, folder / OPTIMIZER_FILE)
        write_tensors({"rng": self.rng}, folder / EXTRA_FILE)


def write_tensors(values: Any, path: Path) -> None:
    """torch.save that raises OSError, with the system's reason, when the disk is full."""
    import torch

    try:
        with path.open("wb") as file:
            torch.save(values, file)
    except RuntimeError as error:  # torch's writer trips over what it could not write
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path}: {why}") from error


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
