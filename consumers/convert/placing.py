"""The converted folder: filled beside its place, then renamed; manifest.json says what is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...streams.blobs import sha256_file, sync
from ..manifest import FileEntry
from .errors import ConvertFailed

FOLDER = "huggingface"
MANIFEST = "manifest.json"
_WORKING, _REPLACED = f"{FOLDER}.converting", f"{FOLDER}.replaced"


class SourceEntry(msgspec.Struct, frozen=True):
    """A file that was converted, as it was then."""

    size: int
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json: written last, so that what it lists is whole.

    `dtype` is the one that was asked for, empty for that of the shards.
    """

    converted_from: str
    dtype: str
    sources: dict[str, SourceEntry]
    files: dict[str, FileEntry]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other conversions out of a folder, and clear up after ones that were killed.

    Raises:
        ConvertFailed: another conversion is at work there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConvertFailed(f"{folder}: is being converted by another process.") from error
        _clear_up(folder)
        yield
    finally:
        os.close(descriptor)


def _clear_up(folder: Path) -> None:
    shutil.rmtree(folder / _WORKING, ignore_errors=True)
    replaced = folder / _REPLACED
    if replaced.is_dir() and not (folder / FOLDER).exists():
        os.rename(replaced, folder / FOLDER)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; it becomes `huggingface/` at the end, or is gone after an error."""
    working, target, replaced = folder / _WORKING, folder / FOLDER, folder / _REPLACED
    working.mkdir()
    try:
        yield working
        sync(working)
        if target.exists():
            os.rename(target, replaced)
        os.rename(working, target)
        sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def keep_others(old: Path, new: Path) -> None:
    """Copy what the folder had and conversion does not make, but for weights and a manifest."""
    if not old.is_dir():
        return
    for path in sorted(p for p in old.iterdir() if p.is_file()):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if not is_weights and path.name != MANIFEST and not (new / path.name).exists():
            shutil.copyfile(path, new / path.name)


def write_manifest(
    folder: Path, *, converted_from: str, dtype: str, sources: Sequence[Path], root: Path
) -> Manifest:
    """List every file with its SHA-256, after each is on the disk."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        sync(path)
        files[path.name] = FileEntry(path.stat().st_size, sha256_file(path))
    kept = _entries(sources, root)
    manifest = Manifest(converted_from=converted_from, dtype=dtype, sources=kept, files=files)
    target = folder / MANIFEST
    target.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    sync(target)
    return manifest


def _entries(sources: Sequence[Path], root: Path) -> dict[str, SourceEntry]:
    found = {}
    for path in sources:
        stat = path.stat()
        found[path.relative_to(root).as_posix()] = SourceEntry(stat.st_size, stat.st_mtime_ns)
    return found


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; None when there is none that fits its files.

    Files are compared by size, none is opened.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return manifest if sizes == {n: f.size for n, f in manifest.files.items()} else None


def is_current(manifest: Manifest, root: Path) -> bool:
    """Whether the converted shards are still what they were; those deleted since do not matter."""
    return all(_is_same(root / name, entry) for name, entry in manifest.sources.items())


def _is_same(path: Path, entry: SourceEntry) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return True
    return (stat.st_size, stat.st_mtime_ns) == (entry.size, entry.mtime_ns)


def changed_files(wanted: Mapping[str, FileEntry], root: Path) -> str:
    """The first file that has not the size it should; empty when all have."""
    for name, entry in wanted.items():
        path = root / name
        if not path.is_file():
            return f"{path}: is missing"
        if (size := path.stat().st_size) != entry.size:
            return f"{path}: has {size:,} bytes, not {entry.size:,}"
    return ""
