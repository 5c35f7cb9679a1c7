"""FSDP shards as veRL and Trinity-RFT save them: `model_world_size_W_rank_R.pt`, one a rank.

Each is a state dict of DTensors (FSDP2, FSDP with a device mesh) or of plain tensors. Plain ones
are the rank's rows, a stretch of the flattened tensor, or all of it.

Source: veRL, verl/model_merger/fsdp_model_merger.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import Box, Shape, Split, shard_box, whole
from .errors import ConvertFailed
from .layout import Layout, Piece, note
from .target import Target, matched
from .unpickle import Inert, ShardedTensor, load_tensors

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt\Z")


def find_shards(folder: Path) -> list[Path]:
    """The shards of a folder, by rank; empty when it has none.

    Raises:
        ConvertFailed: a rank is missing, or the shards of two saves lie together.
    """
    found = [m for p in folder.iterdir() if (m := _NAME.match(p.name))]
    sizes = sorted({int(m[1]) for m in found})
    if not sizes:
        return []
    if (told := _told_world_size(folder)) in sizes:
        sizes = [told]
    if len(sizes) > 1:
        raise ConvertFailed(
            f"{folder}: holds shards of {' and '.join(map(str, sizes))} ranks. Move those of the "
            "other save away."
        )
    shards = [folder / f"model_world_size_{sizes[0]}_rank_{r}.pt" for r in range(sizes[0])]
    for shard in shards:
        if not shard.is_file():
            raise ConvertFailed(f"{shard}: is missing. Bring the file of every rank.")
    return shards


def _told_world_size(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / "fsdp_config.json").read_text())["world_size"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConvertFailed(
            f"{folder / 'fsdp_config.json'}: has no world_size ({error}). Mend or remove it."
        ) from error


class _Held(NamedTuple):
    """One tensor of one shard. `box` is None for plain tensors: the place depends on the others."""

    shape: Shape
    dtype: torch.dtype
    box: Box | None


class ShardFiles:
    """Reads the shards twice: once for what is where, without their bytes, once for the bytes."""

    kind = "FSDP shards"

    def __init__(self, folder: Path, target: Target) -> None:
        self.files: Sequence[Path] = find_shards(folder)
        self._target = target
        self._names: dict[str, str] = {}
        self._boxes: list[dict[str, Box]] = []
        self._grids: dict[str, Shape] = {}

    def layouts(self) -> dict[str, Layout]:
        """See Source. A tensor whose shards are flattened has a flat shape."""
        held = [self._held(rank) for rank in range(len(self.files))]
        self._names = matched(held[0], self._target, self.files[0])
        layouts: dict[str, Layout] = {}
        self._boxes = [{} for _ in held]
        for raw, name in self._names.items():
            parts = self._everywhere(raw, held)
            shape = self._target.shapes.get(name) or self._target.shapes[self._target.tied[name]]
            grid, boxes = _placed(parts, shape)
            for rank, (part, box) in enumerate(zip(parts, boxes, strict=True)):
                self._boxes[rank][raw] = box
                note(layouts, name, grid, (box, self.files[rank]), part.dtype)
        return layouts

    def pieces(self) -> Iterator[Piece]:
        """See Source; `layouts` comes first."""
        for rank, path in enumerate(self.files):
            state = _state(path)
            for raw, name in self._names.items():
                box = self._boxes[rank][raw]
                yield Piece(name, box, _local(state.pop(raw)).reshape(box.shape), path)
            # unmapped before the next shard is mapped
            del state

    def _held(self, rank: int) -> dict[str, _Held]:
        path = self.files[rank]
        found = {}
        for name, value in _state(path).items():
            if isinstance(value, ShardedTensor):
                found[name] = _Held(
                    tuple(value.shape), value.dtype, _checked_box(value, rank, f"{path}: {name}")
                )
            elif isinstance(value, Tensor):
                found[name] = _Held(tuple(value.shape), value.dtype, None)
        return found

    def _everywhere(self, raw: str, held: Sequence[Mapping[str, _Held]]) -> list[_Held]:
        for path, names in zip(self.files, held, strict=True):
            if raw not in names:
                raise ConvertFailed(
                    f"{path}: has no {raw}, which {self.files[0].name} has. The files are of "
                    "different saves: bring those of one."
                )
        return [names[raw] for names in held]


def _state(path: Path) -> dict[str, Any]:
    state = load_tensors(path)
    if not isinstance(state, dict):
        raise ConvertFailed(f"{path}: holds a {type(state).__name__}, not a state dict by name.")
    return state


def _placed(parts: Sequence[_Held], shape: Shape) -> tuple[Shape, list[Box]]:
    """The shape that the boxes lie in, and one box a rank."""
    if all(p.box is not None for p in parts):
        return parts[0].shape, [p.box for p in parts if p.box is not None]
    shapes = [p.shape for p in parts]
    if all(s == shape for s in shapes):
        return shape, [whole(shape)] * len(parts)
    if len(shape) != 1 and all(len(s) == 1 for s in shapes):
        shape = (math.prod(shape),)
    boxes, first = [], 0
    for own in shapes:
        boxes.append(Box((first, *(0 for _ in own[1:])), own))
        first += own[0] if own else 1
    return (first, *shapes[0][1:]), boxes


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, ShardedTensor) else value


def _box(value: ShardedTensor, rank: int, where: str) -> Box:
    """Where the rank's piece of a DTensor lies.

    Raises:
        ConvertFailed: an unknown placement, or a piece of another size than the mesh gives it.
    """
    mesh, place = _place(value._spec.mesh, rank, where)
    splits = [_split(p, where) for p in value._spec.placements]
    box = shard_box(tuple(value.shape), mesh, place, splits)
    if tuple(value._local_tensor.shape) != box.shape:
        raise ConvertFailed(
            f"{where}: rank {rank} of {mesh} holds {tuple(value._local_tensor.shape)}, {box.shape} "
            "was expected. Save the model again with torch's own placements."
        )
    return box


def _checked_box(value: ShardedTensor, rank: int, where: str) -> Box:
    """The box, or ConvertFailed when the DTensor is put together in a way that is not known."""
    try:
        return _box(value, rank, where)
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConvertFailed(
            f"{where}: is no DTensor of a kind that is known ({error!r}). Save it as a DCP "
            "folder, or again with torch 2.13."
        ) from error


def _split(placement: Inert, where: str) -> Split:
    if placement.kind == "Replicate":
        return Split(None)
    if placement.kind in ("Shard", "_StridedShard"):
        dim = placement.__dict__["dim"]
        return Split(int(dim), inside=placement.kind == "_StridedShard")
    raise ConvertFailed(
        f"{where}: is placed as {placement.kind}; Shard and Replicate are allowed. Save the "
        "parameters, not sums in progress."
    )


def _place(mesh: Inert, rank: int, where: str) -> tuple[Shape, Shape]:
    """Shape of a device mesh, and the rank's place in it; meshes are kept in two ways."""
    kept = mesh.__dict__
    if isinstance(ranks := kept.get("mesh", kept.get("_mesh")), Tensor):
        at = (ranks == rank).nonzero()
        if not len(at):
            raise ConvertFailed(
                f"{where}: rank {rank} is not in its device mesh {tuple(ranks.shape)}."
            )
        return tuple(ranks.shape), tuple(int(n) for n in at[0])
    layout = kept.get("_layout")
    if layout is None:
        raise ConvertFailed(f"{where}: its device mesh is of a kind that is not known.")
    sizes, strides = _axes(layout)
    return sizes, tuple(rank // stride % size for size, stride in zip(sizes, strides, strict=True))


def _axes(layout: Inert) -> tuple[Shape, Shape]:
    """Size and stride of each mesh dimension; one that was flattened from several is row-major."""
    kept = layout.__dict__
    if "axes" in kept:
        pairs = [(_flat(a.shape), _flat(a.stride)) for a in kept["axes"]]
        return tuple(math.prod(s) for s, _ in pairs), tuple(s[-1] if s else 1 for _, s in pairs)
    shape, stride = kept["shape"], kept["stride"]
    shape = shape if isinstance(shape, tuple) else (shape,)
    stride = stride if isinstance(stride, tuple) else (stride,)
    return tuple(math.prod(_flat(s)) for s in shape), tuple(_flat(s)[-1] for s in stride)


def _flat(value: Any) -> Shape:
    if isinstance(value, int):
        return (value,)
    return tuple(n for v in value for n in _flat(v))
