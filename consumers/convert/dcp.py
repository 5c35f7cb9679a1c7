"""Folders of torch.distributed.checkpoint: `.metadata` and `*.distcp` files.

Read without torch's own reader: it unpickles `.metadata`, and so runs what somebody put in there.

Source: torch/distributed/checkpoint/{filesystem,metadata}.py of torch 2.13.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import Box, Shape
from .errors import ConvertFailed
from .layout import Layout, Piece, note
from .target import Target, matched
from .unpickle import load_metadata, load_tensors

METADATA = ".metadata"


class Chunk(NamedTuple):
    """One piece of a tensor: `length` bytes at `offset` of `path`."""

    key: str
    box: Box
    path: Path
    offset: int
    length: int


class Stored(NamedTuple):
    """What `.metadata` says of one tensor."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_index(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by its key.

    Raises:
        ConvertFailed: no DCP metadata, a file that is missing or shorter than the metadata says, or
            one that was compressed.
    """
    path = folder / METADATA
    found = load_metadata(path)
    try:
        places = {
            (i.fqn, tuple(i.__dict__.get("offset") or ())): s for i, s in found.storage_data.items()
        }
        stored = {}
        for key, entry in found.state_dict_metadata.items():
            if entry.kind == "TensorStorageMetadata":
                dtype = entry.properties.state[0]
                chunks = tuple(_chunk(key, c, places, folder) for c in entry.chunks)
                stored[key] = Stored(tuple(entry.size), dtype, chunks)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConvertFailed(
            f"{path}: is no metadata of torch.distributed.checkpoint of a kind that is known "
            f"({error!r}). Save the checkpoint again with torch 2.13."
        ) from error
    return stored


def _chunk(key: str, chunk: Any, places: dict[tuple[str, Shape], Any], folder: Path) -> Chunk:
    start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
    place = places[key, start]
    path = folder / place.relative_path
    if path.parent != folder:
        raise ConvertFailed(
            f"{folder / METADATA}: names {place.relative_path}, outside its folder."
        )
    if place.__dict__.get("transform_descriptors"):
        raise ConvertFailed(
            f"{path}: is compressed ({place.transform_descriptors}), which is not supported. Save "
            "without extensions."
        )
    return Chunk(key, Box(start, shape), path, int(place.offset), int(place.length))


def check_files(chunks: Sequence[Chunk]) -> list[Path]:
    """The files of these chunks, each there and long enough."""
    ends: dict[Path, int] = {}
    for chunk in chunks:
        ends[chunk.path] = max(ends.get(chunk.path, 0), chunk.offset + chunk.length)
    for path, end in ends.items():
        if not path.is_file():
            raise ConvertFailed(f"{path}: is missing. Bring the files of every rank.")
        if (size := path.stat().st_size) < end:
            raise ConvertFailed(
                f"{path}: has {size:,} bytes, its {METADATA} needs {end:,}. Copy the file again."
            )
    return sorted(ends)


def read_chunks(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
    """The chunks in the order of the disk, one in memory at a time."""
    for chunk in sorted(chunks, key=lambda c: (c.path, c.offset)):
        with chunk.path.open("rb") as file:
            file.seek(chunk.offset)
            content = file.read(chunk.length)
        tensor = load_tensors(chunk.path, io.BytesIO(content))
        del content
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.box.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConvertFailed(
                f"{chunk.path}: {chunk.key} at byte {chunk.offset:,} is {found}, its {METADATA} "
                f"says {chunk.box.shape}. Copy the folder again."
            )
        yield chunk, tensor


class DcpFolder:
    """A model in a DCP folder, alone or among optimiser and other states."""

    kind = "DCP folder"

    def __init__(self, folder: Path, target: Target) -> None:
        self._index = read_index(folder)
        self._names = matched(self._index, target, folder / METADATA)
        self._chunks = [c for key in self._names for c in self._index[key].chunks]
        self.files: Sequence[Path] = [folder / METADATA, *check_files(self._chunks)]

    def layouts(self) -> dict[str, Layout]:
        """See Source."""
        layouts: dict[str, Layout] = {}
        for key, name in self._names.items():
            stored = self._index[key]
            for chunk in stored.chunks:
                note(layouts, name, stored.shape, (chunk.box, chunk.path), stored.dtype)
        return layouts

    def pieces(self) -> Iterator[Piece]:
        """See Source."""
        for chunk, tensor in read_chunks(self._chunks):
            yield Piece(self._names[chunk.key], chunk.box, tensor, chunk.path)
