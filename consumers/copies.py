"""The Hugging Face copy of the weights in a checkpoint whose shards hold them as well.

Explorers load it, so each save writes it; trainer.save_hf_checkpoint says how long it stays. In a
checkpoint of one process that file is the only copy, and is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from ..streams.blobs import join_uri, write_bytes
from ..streams.weights.object_storage import weights_path
from .checkpoints import CheckpointBroken, CheckpointStore
from .folders import MANIFEST
from .manifest import WEIGHTS, Saved, entries, write_manifest


def drop_copies(store: CheckpointStore, *, spare: int, but: Collection[int]) -> list[str]:
    """Drop them from all but the newest `spare` checkpoints and the steps `but`; returns the names.

    Raises:
        StorageUnavailable, OSError: the storage refuses; what was not reached is as it was.
    """
    dropped = []
    for saved in store.listed()[spare:]:
        files = saved.manifest.files
        if saved.manifest.is_sharded and WEIGHTS in files and saved.manifest.step not in but:
            left = {path: entry for path, entry in files.items() if path != WEIGHTS}
            manifest = msgspec.structs.replace(saved.manifest, files=left)
            # first nobody looks for the file, then it goes
            write_bytes(join_uri(saved.uri, MANIFEST), msgspec.json.encode(manifest))
            store.folders.delete(saved.name, [WEIGHTS])
            store.forget(saved.name)
            dropped.append(saved.name)
    return dropped


def with_copy(store: CheckpointStore, saved: Saved, write_model: Callable[[Path], str]) -> Saved:
    """The checkpoint with the copy that explorers load, made again where it was dropped.

    `write_model` as in Contents, of a model that holds these weights now.

    Raises:
        CheckpointBroken: it wrote others. CheckpointFailed: the storage refuses.
    """
    if weights_path(saved.manifest.base) in saved.manifest.files:
        return saved
    m = saved.manifest
    with store.staged(f"global_step_{m.step}", m.epoch) as staged:
        folder = (staged / WEIGHTS).parent
        folder.mkdir(parents=True)
        if (digest := write_model(folder)) != m.digest:
            raise CheckpointBroken(
                f"{saved.uri}: its weights have digest {digest[:12]} now, its manifest says "
                f"{m.digest[:12]}. Resume from another checkpoint (resume_from)."
            )
        added = entries(staged, {WEIGHTS: digest}, {})
        write_manifest(staged, msgspec.structs.replace(m, files={**m.files, **added}))
        return store.upgrade(staged, saved, added)
