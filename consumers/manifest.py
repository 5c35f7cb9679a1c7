"""manifest.json: what a checkpoint's folder says of itself, and what makes it whole."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from ..schemas.errors import ConfigError
from ..streams.blobs import sha256_file
from ..streams.weights.adapters import ADAPTER_FOLDER
from ..streams.weights.object_storage import HF_FOLDER, WEIGHTS_FILE
from .folders import MANIFEST

WEIGHTS = f"{HF_FOLDER}/{WEIGHTS_FILE}"
SHARDS_FOLDER, HF_NAME = "dcp", "huggingface"


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size: int
    sha256: str


class BaseModel(msgspec.Struct, frozen=True):
    """The model that adapters are laid on: a folder like a checkpoint's, and its digest."""

    uri: str
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json: what makes the folder whole. `rolling`: saved only to shorten a resume.

    `base` stands below an adapter; None for a whole model.
    """

    kind: Literal["full", "weights"]
    branch: str
    step: int
    epoch: int
    files: dict[str, FileEntry]
    digest: str
    num_threads: int = 0
    rolling: bool = False
    base: BaseModel | None = None
    versions: dict[str, str] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether each rank wrote its own part of the states."""
        return f"actor/{SHARDS_FOLDER}/.metadata" in self.files

    def proves(self, path: str) -> bool:
        """Whether the file stays as it is; beside shards `convert` writes a config.json anew."""
        return not self.is_sharded or path == WEIGHTS or HF_NAME not in path.split("/")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: `uri` its folder, `name` its name within `Folders`."""

    uri: str
    name: str
    manifest: Manifest
    manifest_sha256: str


def entries(
    folder: Path, digests: Mapping[str, str], known: Mapping[str, FileEntry]
) -> dict[str, FileEntry]:
    """Every file with its SHA-256; `known` ones are not read again, and may lie elsewhere."""
    entries = dict(known)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in entries:
            digest = digests.get(name) or sha256_file(path)
            entries[name] = FileEntry(path.stat().st_size, digest)
    return dict(sorted(entries.items()))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a filled folder whole."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def recorded_base(adapter: Path) -> BaseModel | None:
    """What is below the adapter of a step that this program saved; None for others' folders.

    Raises:
        ConfigError: the step's manifest cannot be read.
    """
    path = adapter.parent.parent / MANIFEST
    if not (adapter.match(f"*/{ADAPTER_FOLDER}") and path.is_file()):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest).base
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"model.lora_configs[0].path: {path} cannot be read ({error}). Copy the step again, or "
            f"name a copy of {adapter.name} alone."
        ) from error


def versions() -> dict[str, str]:
    """Of what writes a checkpoint and decides its bytes."""
    names = ("streamrft", "torch", "transformers", "safetensors", "peft")
    found = {d: metadata.version(d) for d in names if _is_installed(d)}
    return found | {"python": platform.python_version()}


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
