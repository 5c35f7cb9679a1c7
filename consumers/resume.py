"""Where a trainer that starts goes on: the newest whole full checkpoint of its lineage."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..schemas.errors import ConfigError
from ..schemas.events import Branch
from ..streams.lineage import Lineage
from ..streams.weights.object_storage import weights_path
from .bases import base_of, load_base
from .checkpoints import META, CheckpointBroken, CheckpointStore
from .manifest import BaseModel, Saved
from .recorded import History
from .states import EXTRA_FILE, read_states

if TYPE_CHECKING:
    from .learning.learner import Learner

logger = logging.getLogger("streamrft")


def full_checkpoints(uri: str, lineage: Lineage) -> list[tuple[CheckpointStore, Saved]]:
    """Whole-looking full checkpoints of a lineage, newest first; contents are not verified."""
    found = []
    for segment in lineage.segments:
        store = CheckpointStore(uri, segment.branch)
        for saved in store.scan():
            m = saved.manifest
            if m.kind == "full" and lineage.contains(m.branch, m.step):
                found.append((store, saved))
    return sorted(found, key=lambda f: (f[1].manifest.step, f[1].manifest.epoch), reverse=True)


class Base(NamedTuple):
    """The checkpoint of `store` that training goes on from; `meta` is its trainer_meta.json.

    `below` is the model below its adapter, as it lies now.
    """

    store: CheckpointStore
    saved: Saved
    meta: dict[str, Any]
    below: BaseModel | None


def load_newest(
    learner: Learner, candidates: Iterable[tuple[CheckpointStore, Saved]]
) -> Base | None:
    """Load the first checkpoint whose every SHA-256 is right; returns it with its metadata."""
    for store, saved in candidates:
        with tempfile.TemporaryDirectory(prefix="streamrft.") as into:
            try:
                folder, below = store.fetch(saved, Path(into)), base_of(store, saved.manifest)
                load_base(learner, folder, below)
                _load(learner, store, saved, folder)
            except CheckpointBroken as error:
                logger.error("%s is left aside: %s", saved.uri, error)
                continue
            return Base(store, saved, msgspec.json.decode((folder / META).read_bytes()), below)
    return None


def _load(learner: Learner, store: CheckpointStore, saved: Saved, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    extra = torch.load(folder / "actor" / EXTRA_FILE, weights_only=True)
    if saved.manifest.is_sharded:
        learner.load_shards(store.folders.uri, saved.name, saved.manifest.files, extra)
        return
    learner.load_weights(load_file(folder / weights_path(saved.manifest.base)))
    learner.load_optimizer_state(read_states(folder))
    rng = extra["rng"]
    # checkpoints of one process held no list
    learner.load_rng_state([rng] if isinstance(rng, dict) else rng)


def check_fork(fork: Branch, uri: str, history: History) -> None:
    """A fork begins at a full checkpoint of exactly its step.

    Raises:
        ConfigError: there is none; names those of the parent that can be resumed from.
    """
    found = full_checkpoints(uri, history.lineage(fork.parent))
    steps = sorted({saved.manifest.step for _, saved in found})
    if fork.step not in steps:
        raise ConfigError(
            f"resume_from: global_step_{fork.step} of branch {fork.parent} is no full "
            f"checkpoint. Full ones: {', '.join(f'global_step_{s}' for s in steps) or 'none'}."
        )


def check_log(
    history: History, lineage: Lineage, found: Iterable[tuple[CheckpointStore, Saved]], uri: str
) -> None:
    """Log and full checkpoints belong together.

    A trainer killed before it announced step 0 leaves a checkpoint of which the log knows nothing.

    Raises:
        ConfigError: one of them was lost or exchanged.
    """
    steps = [saved.manifest.step for _, saved in found]
    num_cuts = sum(lineage.contains(b, s) for b, s in history.cuts)
    if num_cuts and not steps:
        raise ConfigError(
            f"the log holds {num_cuts} cuts of branch {lineage.branch}, but {uri} holds no whole "
            "full checkpoint to train them from. Restore the folder, or start under another name."
        )
    if any(steps) and not history.checkpoints:
        raise ConfigError(
            f"{uri} holds checkpoints, but the log knows none of them: it was removed or is "
            "another. Restore the log, or start under another name."
        )
