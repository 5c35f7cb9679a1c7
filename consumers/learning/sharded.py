"""A checkpoint in shards, through torch.distributed.checkpoint: each rank writes and reads its own.

Who writes what is settled by all ranks together; then each rank's thread writes one file, needing
nobody, and `.metadata` is written last. Reading needs no process group, and runs no pickle's code.
Source: torch/distributed/checkpoint of torch 2.13.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ...schemas.errors import ConfigError
from ...streams import faults
from ...streams.blobs import sha256_file
from ..checkpoints import CheckpointBroken
from ..convert.boxes import Box, whole
from ..convert.dcp import METADATA, Chunk, Stored, check_files, read_chunks, read_index
from ..convert.errors import ConvertFailed
from ..folders import open_folders, upload
from ..manifest import SHARDS_FOLDER, FileEntry
from ..states import disk_error
from .ranks import Ranks

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a save goes: a folder of rank 0's machine, which the other ranks fill as well.

    `uri`, where there is one, is an object store's: they upload there, and need not see the folder.
    """

    folder: str
    uri: str = ""


class Written(NamedTuple):
    """What a rank wrote, by part; or why it could not."""

    results: dict[str, list[WriteResult]]
    entries: dict[str, FileEntry]
    error: str = ""


class _Captured(DefaultSavePlanner):
    """A plan whose tensors are at hand: the rank's own, or copies that training leaves alone."""

    def __init__(self, plan: SavePlan, metadata: Metadata | None, values: Mapping[Any, Any]):
        super().__init__()
        self.plan, self.whole, self.values = plan, metadata, values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See SavePlanner."""
        return self.values[write_item.index]


class ShardSave:
    """One rank's share of one save: captured -> writing (a thread) -> written | failed.

    A part, such as "actor", is a folder of shards of its own; all ranks have the same parts.
    """

    def __init__(
        self, parts: Mapping[str, Tensors], ranks: Ranks, *, step: int, copies: bool
    ) -> None:
        """All ranks settle together who writes what; `copies` takes the values as they are now."""
        self._rank, self._step = ranks.rank, step
        self._parts = {name: _captured(part, ranks, copies) for name, part in parts.items()}
        self._written: Written | None = None

    def begin(self, place: Place) -> None:
        """Write in a thread."""
        threading.Thread(target=self._run, args=(place,), name="shards", daemon=True).start()

    @property
    def written(self) -> Written | None:
        """What came of it; None before it has ended."""
        return self._written

    def finish(self, place: Place, all_written: Sequence[Written]) -> None:
        """On rank 0, when all ranks have written: `.metadata` of each part. Raises OSError."""
        for name, planner in self._parts.items():
            writer = FileSystemWriter(_folder(place.folder, name))
            assert planner.whole is not None
            writer.finish(planner.whole, [w.results[name] for w in all_written])

    def _run(self, place: Place) -> None:
        try:
            if self._rank == 0 or not place.uri:
                self._written = self._write(Path(place.folder))
            else:
                with tempfile.TemporaryDirectory(prefix="streamrft.") as folder:
                    written = self._write(Path(folder))
                    upload(Path(folder), place.uri, written.entries)
                self._written = written
        except Exception as error:  # whatever it is, rank 0 waits for it and raises it
            why = disk_error(error, f"the shards of rank {self._rank}")
            self._written = Written({}, {}, str(why))
        finally:
            for planner in self._parts.values():
                planner.values = {}  # copies as large as weights and moments

    def _write(self, step_folder: Path) -> Written:
        results: dict[str, list[WriteResult]] = {}
        for name, planner in self._parts.items():
            writer = FileSystemWriter(_folder(step_folder, name))
            writer.set_up_storage_writer(False, rank=self._rank, use_collectives=False)
            plan = writer.prepare_local_plan(planner.plan)
            results[name] = writer.write_data(plan, planner).wait()
        faults.reach(f"rank_{self._rank}.shards_written", self._step)
        found = {
            f"{name}/{SHARDS_FOLDER}/{file}": _entry(_folder(step_folder, name) / file)
            for name, part in results.items()
            for file in {r.storage_data.relative_path for r in part}
        }
        return Written(results, found)


def _captured(tensors: Tensors, ranks: Ranks, copies: bool) -> _Captured:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
    local = ranks.gathered(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(local) if ranks.rank == 0 else (None, None)
    plan = planner.finish_plan(ranks.gathered(plans)[0][ranks.rank])
    values: dict[Any, Any] = {item.index: planner.resolve_data(item) for item in plan.items}
    if copies:
        values = {i: v.detach().to("cpu", copy=True) for i, v in values.items()}
    return _Captured(plan, metadata, values)


class ShardedFiles:
    """The shards of a saved checkpoint, as one rank reads them: opened -> checked -> read."""

    def __init__(self, uri: str, name: str, files: Mapping[str, FileEntry], into: Path) -> None:
        """Of the folder `name` at `uri`; `files` are its manifest's, copies lie under `into`."""
        self._folders, self._name, self._files, self._into = open_folders(uri), name, files, into
        self._chunks: dict[str, list[Chunk]] = {}

    def check(self, parts: Mapping[str, Tensors]) -> None:
        """Fetch what has values of these tensors, and verify each file's SHA-256.

        Raises:
            CheckpointBroken: a file is missing or changed. ConfigError: another model's shards.
            StorageUnavailable: the store is away.
        """
        try:
            for name, tensors in parts.items():
                self._chunks[name] = self._needed(f"{name}/{SHARDS_FOLDER}", tensors)
        except (ConvertFailed, FileNotFoundError) as error:
            raise CheckpointBroken(f"{self._name}: {error}") from error

    def _needed(self, folder: str, tensors: Tensors) -> list[Chunk]:
        index = read_index(self._fetched(folder, METADATA).parent)
        chunks = [c for key, t in tensors.items() for c in _overlapping(key, t, index)]
        for file in sorted({c.path.name for c in chunks}):
            self._fetched(folder, file)
        check_files(chunks)
        return chunks

    def _fetched(self, folder: str, file: str) -> Path:
        """A file of the manifest, on this machine and verified."""
        path = f"{folder}/{file}"
        local = self._folders.fetch(self._name, [path], self._into) / path
        if path not in self._files or sha256_file(local) != self._files[path].sha256:
            raise CheckpointBroken(f"{self._name}/{path} is not what its manifest says")
        return local

    @torch.no_grad()
    def read(self, parts: Mapping[str, Tensors]) -> None:
        """Fill these tensors, which are those that were checked; other ranks' parts are left."""
        for name, tensors in parts.items():
            for chunk, values in read_chunks(self._chunks[name]):
                _fill(tensors[chunk.key], chunk.box, values)


def _overlapping(key: str, tensor: Tensor, index: Mapping[str, Stored]) -> list[Chunk]:
    stored = index.get(key)
    if stored is None or stored.shape != tuple(tensor.shape):
        found = "is not there" if stored is None else f"has shape {stored.shape}"
        raise ConfigError(
            f"shards: {key} {found}, this model's has {tuple(tensor.shape)}. Resume with the "
            "model.model_path and the algorithm that wrote the checkpoint."
        )
    return [c for c in stored.chunks if _common(c.box, _box(tensor)) is not None]


def _box(tensor: Tensor) -> Box:
    """The place of this rank's part in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _common(one: Box, other: Box) -> Box | None:
    start = tuple(map(max, one.start, other.start))
    end = tuple(map(min, one.end, other.end))
    if any(a >= e for a, e in zip(start, end, strict=True)):
        return None
    return Box(start, tuple(e - a for a, e in zip(start, end, strict=True)))


def _fill(tensor: Tensor, box: Box, values: Tensor) -> None:
    own = _box(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    common = _common(box, own)
    assert common is not None
    local[_slices(common, own)] = values[_slices(common, box)].to(local.device, local.dtype)


def _slices(common: Box, box: Box) -> tuple[slice, ...]:
    starts = [a - b for a, b in zip(common.start, box.start, strict=True)]
    return tuple(slice(a, a + n) for a, n in zip(starts, common.shape, strict=True))


def _folder(step_folder: Path | str, part: str) -> Path:
    return Path(step_folder) / part / SHARDS_FOLDER


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, sha256_file(path))
