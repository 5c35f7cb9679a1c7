"""Which format of shards lies in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .dcp import METADATA, DcpFolder, read_index
from .errors import ConvertFailed
from .layout import Source
from .megatron import MegatronFolder, is_megatron
from .shards import ShardFiles, find_shards
from .target import Target

_BACKEND = "metadata.json"


def detect(folder: Path) -> Callable[[Target], Source] | None:
    """What opens the shards of a folder, or None when it has none.

    Raises:
        ConvertFailed: a rank's file is missing, or two sets of shards lie there.
    """
    if find_shards(folder):
        return lambda target: ShardFiles(folder, target)
    inner = _dcp_folder(folder)
    if inner is None:
        return None
    _check_backend(inner)
    if (inner / _BACKEND).is_file() or is_megatron(read_index(inner)):
        return lambda target: MegatronFolder(inner, target)
    return lambda target: DcpFolder(inner, target)


def _dcp_folder(folder: Path) -> Path | None:
    """The folder itself or the one in it that has `.metadata`; those of optimisers do not count."""
    if (folder / METADATA).is_file():
        return folder
    inner = sorted(p for p in folder.iterdir() if p.is_dir())
    for path in inner:
        if (path / _BACKEND).is_file() or any(path.glob("*.distcp")):
            if not (path / METADATA).is_file() and path.name.startswith("dist_ckpt"):
                _check_backend(path)
                raise ConvertFailed(f"{path / METADATA}: is missing. Copy the whole folder.")
    found = [p for p in inner if (p / METADATA).is_file() and not p.name.startswith("optim")]
    if len(found) > 1:
        names = " and ".join(p.name for p in found)
        raise ConvertFailed(f"{folder}: {names} both hold shards. Name one: --checkpoint-dir.")
    return found[0] if found else None


def _check_backend(folder: Path) -> None:
    """Refuse Megatron's other formats by their name."""
    path = folder / _BACKEND
    if not path.is_file():
        return
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConvertFailed(f"{path}: names no sharded_backend ({error}).") from error
    if backend != "torch_dist":
        raise ConvertFailed(
            f"{path}: the format is {backend!r}; torch_dist is allowed. Convert it with Megatron's "
            "own tool, or save with --ckpt-format torch_dist."
        )
