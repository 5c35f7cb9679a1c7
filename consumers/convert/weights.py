"""model.safetensors written piece by piece: the file is laid out first, then filled anywhere.

Source: the format, https://github.com/huggingface/safetensors#format: 8 bytes of header length,
the header as JSON, then the tensors' bytes in row-major order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .boxes import Box, Shape, runs
from .errors import ConvertFailed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One tensor of the folder: `shape` is what the header says, `grid` what boxes lie in."""

    shape: Shape
    grid: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightsWriter:
    """Files of a model, filled by `write` in any order; a context manager that closes them."""

    def __init__(self, folder: Path, plans: Mapping[str, Plan]) -> None:
        """Lay the files out.

        Raises:
            ConvertFailed: a dtype that safetensors has no code for. OSError: disk full.
        """
        self._plans = plans
        self._places: dict[str, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        groups = _groups(plans)
        names = _file_names(len(groups))
        for group, name in zip(groups, names, strict=True):
            self._lay_out(folder / name, group)
        if len(groups) > 1:
            files = {t: n for group, n in zip(groups, names, strict=True) for t in group}
            total = sum(p.size_bytes for p in plans.values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2))

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Put a piece into its place, in the dtype of the plan."""
        plan = self._plans[name]
        descriptor, first = self._places[name]
        if not box.numel:
            return
        view, width = as_bytes(tensor.to(plan.dtype)), plan.dtype.itemsize
        for at, inside, length in runs(box, plan.grid):
            begin = inside * width
            _write(descriptor, view[begin : begin + length * width], first + at * width)

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors:
            if kind is None:
                os.fsync(descriptor)
            os.close(descriptor)

    def _lay_out(self, path: Path, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            plan, begin = self._plans[name], end
            end += plan.size_bytes
            code = _CODES.get(plan.dtype)
            if code is None:
                raise ConvertFailed(f"{path}: {name} is {plan.dtype}, which has no place there.")
            offsets = [begin, end]
            header[name] = {"dtype": code, "shape": list(plan.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._descriptors.append(descriptor)
        _write(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        first = 8 + len(text)
        os.truncate(descriptor, first + end)
        begin = first
        for name in names:
            self._places[name] = descriptor, begin
            begin += self._plans[name].size_bytes


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order; copied only where it does not lie so."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _write(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _groups(plans: Mapping[str, Plan]) -> list[list[str]]:
    """Names a file, in order, none over MAX_FILE_BYTES unless one tensor is."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, plan in plans.items():
        if groups[-1] and size + plan.size_bytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += plan.size_bytes
    return groups


def _file_names(num: int) -> list[str]:
    if num == 1:
        return [SINGLE]
    return [f"model-{n:05d}-of-{num:05d}.safetensors" for n in range(1, num + 1)]


def read_shapes(folder: Path) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype code of every tensor of a Hugging Face folder, from the headers alone.

    Returns:
        Nothing when there are no safetensors.

    Raises:
        ConvertFailed: a file of the index is missing, cut, or has no header.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConvertFailed(f"{index}: cannot be read ({error}). Copy it again.") from error
    else:
        names = [SINGLE] if (folder / SINGLE).is_file() else []
    found: dict[str, tuple[Shape, str]] = {}
    for name in names:
        found |= _header(folder / name)
    return found


def _header(path: Path) -> dict[str, tuple[Shape, str]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = json.loads(file.read(length)) if length < size else {}
        tensors = {n: t for n, t in header.items() if n != "__metadata__"}
        end = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertFailed(f"{path}: cannot be read ({error}). Copy it again.") from error
    if size != end or not tensors:
        raise ConvertFailed(f"{path}: has {size:,} bytes, its header needs {end:,}. Copy it again.")
    return {n: (tuple(t["shape"]), t["dtype"]) for n, t in tensors.items()}
