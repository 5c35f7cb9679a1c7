"""What every format is read as: named tensors, and the pieces that they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .boxes import Box, Shape, hole
from .errors import ConvertFailed


@dataclass
class Layout:
    """One tensor of a checkpoint.

    Args:
        shape: of the whole tensor; boxes lie in it.
        dtype: of every piece.
        boxes: each piece's place and the first file that holds it; copies are read once.
    """

    shape: Shape
    dtype: torch.dtype
    boxes: dict[Box, Path] = field(default_factory=dict)

    def check(self, name: str) -> None:
        """Raise ConvertFailed unless the pieces make up the whole tensor."""
        if why := hole(self.boxes, self.shape):
            files = sorted({str(p) for p in self.boxes.values()})
            raise ConvertFailed(
                f"{files[-1]}: {name} {self.shape} is not whole ({why}; pieces in {len(files)} "
                "files). Bring every rank's file of the same save."
            )


class Piece(NamedTuple):
    """A tensor's part as it is read: `tensor` has `box.shape` and lies in `path`."""

    name: str
    box: Box
    tensor: Tensor
    path: Path


class Source(Protocol):
    """A sharded checkpoint. Both calls may block on the disk; neither keeps tensors."""

    kind: str
    files: Sequence[Path]

    def layouts(self) -> dict[str, Layout]:
        """Every tensor of the model, by the names of the Hugging Face model."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Every piece of them, one at a time, file by file; the tensor is good until the next."""
        ...


def note(
    layouts: dict[str, Layout], name: str, shape: Shape, piece: tuple[Box, Path], dtype: torch.dtype
) -> None:
    """Add a piece to the layout of its tensor.

    Raises:
        ConvertFailed: its file gives another shape or dtype than the files before.
    """
    box, path = piece
    layout = layouts.setdefault(name, Layout(shape, dtype))
    if (layout.shape, layout.dtype) != (shape, dtype):
        raise ConvertFailed(
            f"{path}: {name} is {shape} {dtype}, other files say {layout.shape} {layout.dtype}. "
            "The files are of different saves: bring those of one."
        )
    layout.boxes.setdefault(box, path)
