"""Boxes: the places that pieces of a tensor take in the whole tensor. Pure arithmetic.

W ranks, D dimensions of a tensor, M dimensions of a device mesh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A piece: where it begins in the whole tensor and how far it reaches, both of length D."""

    start: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        """One behind the last place, of length D."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))


def whole(shape: Shape) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def runs(box: Box, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Contiguous stretches of a box: (first element in the whole, first in the box, length)."""
    if not box.numel:
        return
    cut = len(shape)
    while cut > 0 and box.shape[cut - 1] == shape[cut - 1]:
        cut -= 1
    # the last cut dimension and all whole ones behind it lie together
    inner = max(cut - 1, 0)
    length = math.prod(box.shape[inner:])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = sum(a * s for a, s in zip(box.start, strides, strict=True))
    for n, place in enumerate(_places(box.shape[:inner])):
        at = base + sum(p * s for p, s in zip(place, strides[:inner], strict=True))
        yield at, n * length, length


def _places(shape: Shape) -> Iterator[Shape]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _places(shape[1:]):
            yield (first, *rest)


def hole(boxes: Collection[Box], shape: Shape) -> str:
    """Why the boxes are no exact tiling of the whole; empty when they are."""
    filled = [b for b in boxes if b.numel]
    for box in filled:
        if len(box.shape) != len(shape) or any(
            a < 0 or e > n for a, e, n in zip(box.start, box.end, shape, strict=True)
        ):
            return f"a piece reaches from {box.start} to {box.end}"
    if first := _overlap(sorted(filled, key=lambda b: b.start)):
        return f"two pieces meet at {first}"
    found, wanted = sum(b.numel for b in filled), math.prod(shape)
    return "" if found == wanted else f"{found:,} of {wanted:,} elements are there"


def _overlap(boxes: Sequence[Box]) -> Shape | None:
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if box.shape and other.start[0] >= box.end[0]:
                break
            low = [max(a, b) for a, b in zip(box.start, other.start, strict=True)]
            high = [min(a, b) for a, b in zip(box.end, other.end, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                return tuple(low)
    return None


@dataclass(frozen=True)
class Split:
    """What one dimension of the mesh does to a tensor: cut dimension `dim`, or copy it (None).

    `inside`: cut what the mesh dimensions to the right have cut already (strided shards).
    """

    dim: int | None
    inside: bool = False


def shard_box(shape: Shape, mesh: Shape, place: Shape, splits: Sequence[Split]) -> Box:
    """The box of one rank.

    Args:
        shape: of the whole tensor, length D.
        mesh: ranks along each dimension of the mesh, length M.
        place: of the rank in the mesh, length M.
        splits: one a mesh dimension, length M.

    Source: torch.distributed.tensor cuts as torch.chunk does: ceil(n / W) each, the rest is last.
    """
    start, size = [0] * len(shape), list(shape)
    order = sorted(range(len(splits)), key=lambda m: splits[m].inside)
    for m in order:
        dim = splits[m].dim
        if dim is None:
            continue
        step = -(-size[dim] // mesh[m]) if size[dim] else 0
        low = min(place[m] * step, size[dim])
        start[dim] += low
        size[dim] = min(step, size[dim] - low)
    return Box(tuple(start), tuple(size))
