"""What a resume needs beside the weights: optimiser and random state, as files or as copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoints import FileEntry

if TYPE_CHECKING:
    from .learning.learner import Learner

OPTIMIZER_FILE = "optim_world_size_1_rank_0.pt"
EXTRA_FILE = "extra_state_world_size_1_rank_0.pt"


@dataclass(frozen=True)
class States:
    """Optimiser and random state of one moment."""

    optimizer: dict[str, Any]
    rng: list[dict[str, Any]]

    def copied(self) -> States:
        """The same values in memory of their own, whatever the learner does next."""
        return States(copied(self.optimizer), copied(self.rng))

    def write(self, folder: Path, into: str) -> dict[str, FileEntry]:
        """Fill the folder `actor/` of a checkpoint, see Contents. Raises OSError.

        Both files load with weights_only=True.
        """
        write_tensors(self.optimizer, folder / "actor" / OPTIMIZER_FILE)
        write_tensors({"rng": self.rng}, folder / "actor" / EXTRA_FILE)
        return {}


@dataclass(frozen=True)
class ShardedStates:
    """The same of several ranks, each of which captured its own part and writes it."""

    learner: Learner
    extra: dict[str, Any]

    def write(self, folder: Path, into: str) -> dict[str, FileEntry]:
        """As `States.write`; what is small lies in one file. Raises OSError, RanksLost."""
        from .learning.sharded import Place

        write_tensors(self.extra, folder / "actor" / EXTRA_FILE)
        return self.learner.write_shards(Place(str(folder), into))


def states_of(learner: Learner, step: int, *, copies: bool = False) -> States | ShardedStates:
    """What `learner` holds after `step`; without copies it is good until the next one."""
    if learner.num_ranks > 1:
        return ShardedStates(learner, learner.capture_shards(step=step, copies=copies))
    states = States(learner.optimizer_state(), learner.rng_state())
    return states.copied() if copies else states


def write_tensors(values: Any, path: Path) -> None:
    """torch.save that raises OSError, with the system's reason, when the disk is full."""
    import torch

    try:
        with path.open("wb") as file:
            torch.save(values, file)
    except RuntimeError as error:
        raise disk_error(error, str(path)) from error


def disk_error(error: Exception, where: str) -> OSError:
    """What torch's writers make of a full disk: they trip over what they could not write."""
    why = error.__context__ if isinstance(error.__context__, OSError) else error
    return OSError(f"{where}: {why}")


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
