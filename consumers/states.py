"""What a resume needs beside the weights: optimiser and random state, as files or as copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas.errors import ConfigError
from ..streams.weights.object_storage import WEIGHTS_FILE
from .manifest import HF_NAME, FileEntry

if TYPE_CHECKING:
    from .learning.learner import Learner

OPTIMIZER_FILE = "optim_world_size_1_rank_0.pt"
EXTRA_FILE = "extra_state_world_size_1_rank_0.pt"


@dataclass(frozen=True)
class States:
    """Optimiser and random state of one moment."""

    optimizer: dict[str, Any]
    rng: list[dict[str, Any]]
    critic_config: bytes | None = None

    def copied(self) -> States:
        """The same values in memory of their own, whatever the learner does next."""
        return replace(self, optimizer=copied(self.optimizer), rng=copied(self.rng))

    def write(self, folder: Path, into: str) -> dict[str, FileEntry]:
        """Fill the folders `actor/` and `critic/` of a checkpoint, see Contents. Raises OSError.

        Files of torch load with weights_only=True.
        """
        own = {name: value for name, value in self.optimizer.items() if name != "critic"}
        write_tensors(own, folder / "actor" / OPTIMIZER_FILE)
        if self.critic_config is not None:
            self._write_critic(_critic_folder(folder, self.critic_config))
        write_tensors({"rng": self.rng}, folder / "actor" / EXTRA_FILE)
        return {}

    def _write_critic(self, folder: Path) -> None:
        from safetensors.torch import save_file

        critic = self.optimizer["critic"]
        weights = folder / HF_NAME / WEIGHTS_FILE
        save_file(critic["weights"], weights, metadata={"format": "pt"})
        # safetensors writes mode 0600, which processes of another user could not read
        weights.chmod(0o644)
        write_tensors(critic["optimizer"], folder / OPTIMIZER_FILE)


@dataclass(frozen=True)
class ShardedStates:
    """The same of several ranks, each of which captured its own part and writes it."""

    learner: Learner
    extra: dict[str, Any]
    critic_config: bytes | None = None

    def write(self, folder: Path, into: str) -> dict[str, FileEntry]:
        """As `States.write`; what is small lies in one file.

        Raises:
            OSError: a rank could not write. RanksLost: one is gone. ConfigError: a rank wrote to
                a disk of its own.
        """
        from .learning.sharded import Place

        write_tensors(self.extra, folder / "actor" / EXTRA_FILE)
        if self.critic_config is not None:
            _critic_folder(folder, self.critic_config)
        files = self.learner.write_shards(Place(str(folder), into))
        if apart := [path for path in files if not into and not (folder / path).exists()]:
            raise ConfigError(
                f"{folder}: shards of other ranks, such as {apart[0]}, did not come here: their "
                "machines do not share this disk. Set storage.uri to one that all of them see, or "
                "to s3://."
            )
        return files


def states_of(learner: Learner, step: int, *, copies: bool = False) -> States | ShardedStates:
    """What `learner` holds after `step`; without copies it is good until the next one."""
    if learner.num_ranks > 1:
        extra = learner.capture_shards(step=step, copies=copies)
        return ShardedStates(learner, extra, learner.critic_config())
    states = States(learner.optimizer_state(), learner.rng_state(), learner.critic_config())
    return states.copied() if copies else states


def read_states(folder: Path) -> dict[str, Any]:
    """The optimiser's state of a checkpoint of one process, with a critic where there is one."""
    import torch
    from safetensors.torch import load_file

    states = torch.load(folder / "actor" / OPTIMIZER_FILE, weights_only=True)
    critic = folder / "critic"
    if (critic / OPTIMIZER_FILE).exists():
        states["critic"] = {
            "weights": load_file(critic / HF_NAME / WEIGHTS_FILE),
            "optimizer": torch.load(critic / OPTIMIZER_FILE, weights_only=True),
        }
    return states


def _critic_folder(step_folder: Path, config: bytes) -> Path:
    folder = step_folder / "critic"
    (folder / HF_NAME).mkdir(parents=True)
    (folder / HF_NAME / "config.json").write_bytes(config)
    return folder


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
