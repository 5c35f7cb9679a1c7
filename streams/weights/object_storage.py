"""Weights from the storage where the trainer put them: announced by an event, proved by a digest.

Who calls: explorers before they serve a new policy_version, the trainer when it resumes. Reading is
idempotent; nothing is served before all its bytes are here and their SHA-256 is the announced one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...schemas.errors import StreamrftError
from ...schemas.events import Checkpoint
from ..blobs import open_storage, sha256_file, storage_errors
from .adapters import ADAPTER_FILE, ADAPTER_FOLDER

if TYPE_CHECKING:
    import torch

HF_FOLDER = "actor/huggingface"
WEIGHTS_FILE = "model.safetensors"


class WeightsUnavailable(StreamrftError):
    """The announced bytes are not there, or are others: the old version goes on serving.

    A newer Checkpoint event, or the storage when it is back, mends it.
    """

    retriable = True


def base_of(checkpoint: Checkpoint) -> Checkpoint | None:
    """The whole model below an adapter, to be read like a checkpoint; None for a whole model."""
    if not checkpoint.base_uri:
        return None
    return msgspec.structs.replace(
        checkpoint,
        uri=checkpoint.base_uri,
        digest=checkpoint.base_digest,
        base_uri="",
        base_digest="",
    )


def load_state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint on the CPU, by the names of its file: a model's or an adapter's.

    Raises:
        WeightsUnavailable: the file is missing, cannot be read, or has another digest.
    """
    from safetensors.torch import load

    content = _read(f"{checkpoint.uri}/{weights_path(checkpoint.base_uri)}", checkpoint)
    _check_digest(hashlib.sha256(content).hexdigest(), checkpoint)
    return load(content)


def fetch_model_folder(checkpoint: Checkpoint, cache_dir: Path | str) -> Path:
    """A local folder for `from_pretrained`, its weights verified; kept under the digest's name.

    Of an adapter it is peft's folder; `base_of` is the model's.

    Raises:
        WeightsUnavailable: a file is missing, cannot be read, or the weights have another digest.
    """
    kept = Path(cache_dir) / checkpoint.digest
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=kept.parent, prefix=f"{checkpoint.digest[:12]}."))
    folder, _, file = weights_path(checkpoint.base_uri).rpartition("/")
    try:
        _copy_folder(f"{checkpoint.uri}/{folder}", partial, checkpoint)
        if not (partial / file).is_file():
            uri = f"{checkpoint.uri}/{folder}"
            raise _unavailable(checkpoint, f"{uri} holds no {file}")
        _check_digest(sha256_file(partial / file), checkpoint)
        _rename_once(partial, kept)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return kept


def weights_path(base: object) -> str:
    """Where the weights lie in a checkpoint's folder: an adapter's over a `base`, or a model's."""
    return f"{ADAPTER_FOLDER}/{ADAPTER_FILE}" if base else f"{HF_FOLDER}/{WEIGHTS_FILE}"


def _read(uri: str, checkpoint: Checkpoint) -> bytes:
    fs, path = open_storage(uri)
    try:
        return fs.cat_file(path)
    except storage_errors() as error:
        raise _unavailable(checkpoint, f"{uri} cannot be read ({error})") from error


def _copy_folder(uri: str, into: Path, checkpoint: Checkpoint) -> None:
    fs, path = open_storage(uri)
    try:
        fs.invalidate_cache()
        for found in fs.find(path):
            fs.get_file(found, str(into / found.rsplit("/", 1)[-1]))
    except storage_errors() as error:
        raise _unavailable(checkpoint, f"{uri} cannot be read ({error})") from error


def _check_digest(found: str, checkpoint: Checkpoint) -> None:
    if found != checkpoint.digest:
        raise _unavailable(
            checkpoint, f"SHA-256 {found[:12]} found, {checkpoint.digest[:12]} announced"
        )


def _unavailable(checkpoint: Checkpoint, what: str) -> WeightsUnavailable:
    return WeightsUnavailable(
        f"weights of policy_version {checkpoint.step} on branch {checkpoint.branch} at "
        f"{checkpoint.uri}: {what}. A newer checkpoint event replaces them."
    )


def _rename_once(partial: Path, kept: Path) -> None:
    """Several processes may fetch the same digest: the first one's folder stands."""
    try:
        os.rename(partial, kept)
    except OSError:
        if not kept.is_dir():
            raise
