"""The model below a run's adapters: written once beside the checkpoints, loaded at a resume."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.errors import ConfigError, StorageCorrupt
from ..streams.weights.adapters import ADAPTER_FOLDER
from .checkpoints import CheckpointBroken, CheckpointStore, Contents
from .manifest import WEIGHTS, BaseModel, Manifest, recorded_base

if TYPE_CHECKING:
    from .learning.learner import Learner

BASE = "base_model"


def save_base(
    learner: Learner, uri: str, *, epoch: int, before_place: Callable[[], None]
) -> BaseModel | None:
    """Write the model below the learner's adapter under `uri`; None where it trains no adapter.

    A model with the same weights that lies there already is taken.

    Raises:
        CheckpointFailed: as `CheckpointStore.save`. ConfigError: the adapter that the learner began
            with was trained over another model.
    """
    if not learner.policy.has_adapter:
        return None
    store = CheckpointStore(f"{uri}/{BASE}", "main")
    store.remove_staged()
    state = learner.state_dict(is_base=True)

    def write(folder: Path) -> str:
        digest = learner.policy.save_base(folder, state)
        _check_start(learner.policy.start_adapter, digest)
        return digest

    saved = store.save(Contents(write), step=0, epoch=epoch, before_place=before_place)
    return BaseModel(saved.uri, saved.manifest.digest)


def _check_start(adapter: Path | None, digest: str) -> None:
    """What `digest` is of may lie below an adapter to go on with, as far as one of ours says."""
    recorded = None if adapter is None else recorded_base(adapter)
    if recorded is not None and recorded.digest != digest:
        raise ConfigError(
            f"model.lora_configs[0].path: the adapter {adapter} was trained over {recorded.uri}, "
            f"whose weights have SHA-256 {recorded.digest[:12]}; those of model.model_path have "
            f"{digest[:12]}. Name that model. Where both are one model, written by other versions "
            "of transformers, name a copy of the adapter's folder alone."
        )


def base_of(store: CheckpointStore, manifest: Manifest) -> BaseModel | None:
    """The model below a checkpoint of `store`: beside it, also where all of it was moved since.

    Where no such model is there it is the recorded one; None below a whole model.
    """
    if manifest.base is None:
        return None
    beside = CheckpointStore(f"{store.root}/{BASE}", "main").scan()
    found = (s for s in beside if s.manifest.digest == manifest.base.digest)
    return next((BaseModel(s.uri, s.manifest.digest) for s in found), manifest.base)


def load_base(learner: Learner, folder: Path, base: BaseModel | None) -> None:
    """Before the adapter of a checkpoint's `folder` is loaded, load the model below it.

    Raises:
        ConfigError: the learner trains an adapter and the checkpoint is none, or the reverse; or
            another adapter. StorageCorrupt: the model below is not there, or is another.
    """
    from safetensors.torch import load_file

    if (base is not None) != learner.policy.has_adapter:
        held = "a whole model" if base is None else "a LoRA adapter"
        trained = "an adapter" if base is None else "the whole model"
        raise ConfigError(
            f"model.lora_configs: the checkpoint {folder} holds {held}, the configuration trains "
            f"{trained}. Set it as it was, or begin a new run or stage from it."
        )
    if base is not None:
        learner.policy.check_adapter(folder / ADAPTER_FOLDER)
        with tempfile.TemporaryDirectory(prefix="streamrft.") as into:
            learner.load_weights(load_file(_fetched(base, Path(into)) / WEIGHTS), is_base=True)


def _fetched(base: BaseModel, into: Path) -> Path:
    uri, _, name = base.uri.rpartition("/")
    store = CheckpointStore(uri, "main")
    try:
        saved = store.look(name)
        if saved.manifest.digest != base.digest:
            raise CheckpointBroken(f"its weights have SHA-256 {saved.manifest.digest[:12]}")
        return store.fetch(saved, into)
    except CheckpointBroken as error:
        # no older checkpoint helps: all of a run lie over the same model
        raise StorageCorrupt(
            f"{base.uri}: the model below the adapter, SHA-256 {base.digest[:12]}, is not whole "
            f"({error}). Restore the folder."
        ) from error
