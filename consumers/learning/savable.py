"""What of a learner is saved and loaded again: weights, optimiser and random state.

Whole, as one process holds it, or in shards, of which each rank writes and reads its own. All ranks
take part in everything here; rank 0 tells the others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import ConfigError, StorageUnavailable, StreamrftError
from ..checkpoints import CheckpointBroken
from ..manifest import FileEntry
from ..settings import TrainerSettings
from ..states import copied
from .critic import Critic
from .model import PolicyModel
from .optimizer import ScheduledAdamW
from .ranks import Ranks, seed_of

_POLL_S = 0.1


class Savable:
    """The half of a learner that checkpoints know."""

    _settings: TrainerSettings
    _ranks: Ranks
    _policy: PolicyModel
    _optimizer: ScheduledAdamW
    _critic: Critic | None
    _shards: Any = None

    @property
    def num_ranks(self) -> int:
        """How many processes hold the model together."""
        return self._ranks.size

    @property
    def policy(self) -> PolicyModel:
        """The model, and how it is written."""
        return self._policy

    def state_dict(self, *, is_base: bool = False) -> dict[str, Tensor]:
        """What is trained as its file holds it: on the CPU, a tied head left out.

        `is_base` gives the model below an adapter.
        """
        with self._ranks.together("state_dict", is_base=is_base):
            return self._policy.state_dict(is_base=is_base)

    def load_weights(self, state: Mapping[str, Tensor] | None, *, is_base: bool = False) -> None:
        """Replace the weights in place; names as in `state_dict`, else ConfigError.

        None on ranks above 0, which are given theirs by rank 0; so in `load_optimizer_state`.
        """
        if state is not None:
            self._policy.check_weights(state, is_base=is_base)
        with self._ranks.together("load_weights", state=None, is_base=is_base):
            self._policy.load_weights(state, is_base=is_base)

    def save_hf(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> str:
        """Write the Hugging Face folder, or peft's; returns the sha256 of its safetensors.

        config.json, generation_config.json, tokenizer files, chat_template.jinja and one
        model.safetensors, whose bytes are a function of the weights alone. `state` is written in
        place of the present weights; a copy of `state_dict` may be, from another thread too.
        """
        return self._policy.save(folder, self.state_dict() if state is None else state)

    def optimizer_state(self) -> dict[str, Any]:
        """Of one process, for torch.save; loads with weights_only=True. Holds the whole critic."""
        assert self.num_ranks == 1, "several ranks save shards"
        state = self._optimizer.state()
        return state if self._critic is None else {**state, "critic": self._critic.state()}

    def load_optimizer_state(self, state: Mapping[str, Any] | None) -> None:
        """Undo `optimizer_state`, on any number of ranks."""
        if state is not None and self._critic is not None and "critic" not in state:
            raise _no_critic()
        with self._ranks.together("load_optimizer_state", state=None):
            own = None if state is None else {n: v for n, v in state.items() if n != "critic"}
            self._optimizer.load_state(own)
            if self._critic is not None:
                self._critic.load_state(None if state is None else state["critic"])

    def critic_config(self) -> bytes | None:
        """config.json of the critic's Hugging Face folder; None without a critic."""
        return None if self._critic is None else self._critic.config()

    def rng_state(self) -> list[dict[str, Tensor]]:
        """Random generators of torch by rank, for torch.save."""
        with self._ranks.together("rng_state"):
            return self._ranks.gathered(self._own_rng())

    def _own_rng(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_rng_state(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Undo `rng_state`; a rank that was not there then begins with a seed of its own."""
        with self._ranks.together("load_rng_state", states=states):
            if self._ranks.rank >= len(states):
                torch.manual_seed(seed_of(self._settings.seed, self._ranks.rank))
                return
            state = states[self._ranks.rank]
            torch.set_rng_state(state["cpu"].cpu())
            if "cuda" in state and self._policy.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"].cpu())

    # --- in shards

    def capture_shards(self, *, step: int, copies: bool) -> dict[str, Any]:
        """Settle what each rank writes; what is small and not sharded is returned.

        `copies` takes the values as they are now, otherwise no step may come before the writing.
        """
        from .sharded import ShardSave

        with self._ranks.together("capture_shards", step=step, copies=copies):
            self._shards = ShardSave(self._tensors(), self._ranks, step=step, copies=copies)
            outlines = {name: copied(o.outline()) for name, o in self._optimizers().items()}
            return {"rng": self._ranks.gathered(self._own_rng()), "optimizers": outlines}

    def write_shards(self, place: Any) -> dict[str, FileEntry]:
        """Write what was captured and wait for all ranks; on rank 0, from any thread.

        Training may go on meanwhile, if copies were taken. Returns each file's entry.

        Raises:
            OSError: a rank could not write its part. RanksLost: one is gone.
        """
        self.begin_shards(place)
        while None in (written := self.written_shards()):
            time.sleep(_POLL_S)
        if errors := [w.error for w in written if w.error]:
            raise OSError("; ".join(errors))
        self._shards.finish(place, written)
        return {path: entry for w in written for path, entry in w.entries.items()}

    def begin_shards(self, place: Any) -> None:
        """Every rank begins to write, see `write_shards`."""
        with self._ranks.together("begin_shards", place=place):
            self._shards.begin(place)

    def written_shards(self) -> list[Any]:
        """What each rank wrote; None for one that has not ended."""
        with self._ranks.together("written_shards"):
            return self._ranks.gathered(self._shards.written)

    def load_shards(
        self, uri: str, folder: str, files: Mapping[str, FileEntry], extra: Mapping[str, Any]
    ) -> None:
        """Load the checkpoint `folder` at `uri`, each rank its part, or nothing of it.

        `files` as in its manifest; `extra` is what `capture_shards` returned.

        Raises:
            CheckpointBroken: a file is missing or changed. StorageUnavailable: nobody can tell now.
            ConfigError: it is of another model or algorithm.
        """
        if errors := self._loaded(uri, folder, files, extra["optimizers"]):
            kind = StorageUnavailable if any(e.retriable for e in errors) else CheckpointBroken
            raise kind("; ".join(str(e) for e in errors))
        self.load_rng_state(extra["rng"])

    def _loaded(
        self,
        uri: str,
        folder: str,
        files: Mapping[str, FileEntry],
        outlines: Mapping[str, Mapping[str, Any]],
    ) -> list[StreamrftError]:
        """Load, or give what any rank found in the way; then nothing was loaded."""
        from .sharded import ShardedFiles

        arguments = {"uri": uri, "folder": folder, "files": files, "outlines": outlines}
        with (
            self._ranks.together("_loaded", **arguments),
            tempfile.TemporaryDirectory(prefix="streamrft.") as into,
        ):
            if self._critic is not None and "critic" not in outlines:
                raise _no_critic()
            shards = ShardedFiles(uri, folder, files, Path(into))
            error: StreamrftError | None = None
            try:
                shards.check(self._tensors(outlines))
            except (CheckpointBroken, StorageUnavailable) as caught:
                error = caught
            if errors := [e for e in self._ranks.gathered(error) if e is not None]:
                return errors
            for part, optimizer in self._optimizers().items():
                optimizer.load_outline(outlines[part])
            shards.read(self._tensors())
            return []

    def _optimizers(self) -> dict[str, ScheduledAdamW]:
        found = {"actor": self._optimizer}
        return found if self._critic is None else {**found, "critic": self._critic.optimizer}

    def _tensors(
        self, outlines: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """This rank's part of all tensors: `model.<name>` and `optimizer.<name>.<moment>`.

        With `outlines` there are the moments that these name, in shape and place only.
        """
        weights = {"actor": self._policy.named_weights()}
        if self._critic is not None:
            weights["critic"] = self._critic.named_weights()
        return {
            part: {f"model.{n}": t for n, t in weights[part].items()}
            | {
                f"optimizer.{n}": t
                for n, t in optimizer.moments(outlines[part] if outlines else None).items()
            }
            for part, optimizer in self._optimizers().items()
        }


def _no_critic() -> ConfigError:
    return ConfigError(
        "algorithm.algorithm_type: the checkpoint has no critic, it was written by another "
        "algorithm. Begin a new run, with model.model_path the checkpoint's model."
    )
