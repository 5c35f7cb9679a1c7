"""Weights from stage to stage, and what of a stage is done, read from the log alone."""

from __future__ import annotations

from ..consumers.folders import MANIFEST
from ..schemas import events as ev
from ..schemas.errors import LogError, StorageGone
from ..schemas.topics import Topics
from ..streams.blobs import join_uri, read_bytes
from ..streams.lineage import surviving_lineage
from ..streams.log import Log
from ..streams.reading import read_events
from ..streams.weights.adapters import ADAPTER_FOLDER
from ..streams.weights.object_storage import HF_FOLDER, base_of, fetch_model_folder
from .plan import Stage, starting_from


def with_model(log: Log, stage: Stage) -> Stage:
    """The stage, its trainer starting from the last full checkpoint of the stage before.

    From an object store the model is copied into the job folder first.

    Raises:
        LogError: that stage has none yet. WeightsUnavailable: its files cannot be read now.
    """
    before = last_trained(stage.after)
    if before is None:
        return stage
    checkpoint = newest_full(log, before.topics)
    if checkpoint is None:
        raise LogError(
            f"stage {stage.name}: stage {before.name} has no full checkpoint on the log to start "
            f"from. Run it first: streamrft run, or streamrft train --stage {before.name}."
        )
    base = base_of(checkpoint)
    model = _local_folder(base or checkpoint, stage, HF_FOLDER)
    adapter = _local_folder(checkpoint, stage, ADAPTER_FOLDER) if base else None
    return starting_from(stage, model, adapter)


def _local_folder(checkpoint: ev.Checkpoint, stage: Stage, folder: str) -> str:
    if "://" in checkpoint.uri:
        return str(fetch_model_folder(checkpoint, stage.job_dir / "start"))
    return f"{checkpoint.uri}/{folder}"


def newest_full(log: Log, topics: Topics) -> ev.Checkpoint | None:
    """The full checkpoint with the most steps on the surviving branch; None before the first."""
    events = list(read_events(log, topics, "checkpoints"))
    lineage = surviving_lineage([e for e in events if isinstance(e, ev.Branch)])
    found = [
        e
        for e in events
        if isinstance(e, ev.Checkpoint) and e.kind == "full" and lineage.contains(e.branch, e.step)
    ]
    return max(found, key=lambda c: c.step, default=None)


def failed_save(log: Log, topics: Topics) -> ev.SaveFailed | None:
    """The save that failed last, unless one of its kind and branch worked at its step or later."""
    failed: ev.SaveFailed | None = None
    for event in read_events(log, topics, "checkpoints"):
        if isinstance(event, ev.SaveFailed):
            failed = event
        elif isinstance(event, ev.Branch):
            failed = None
        elif failed and isinstance(event, ev.Checkpoint) and event.step >= failed.step:
            failed = None if event.kind == "full" or failed.kind == "weights" else failed
    return failed


def is_kept(checkpoint: ev.Checkpoint) -> bool:
    """Whether its folder is still there, whole. Raises StorageUnavailable: nobody can tell now."""
    try:
        read_bytes(join_uri(checkpoint.uri, MANIFEST))
    except StorageGone:
        return False
    return True


def last_trained(stage: Stage | None) -> Stage | None:
    """The stage itself, or the nearest before it that has a trainer."""
    while stage is not None and stage.trainer is None:
        stage = stage.after
    return stage
