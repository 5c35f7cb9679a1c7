"""Packed token arrays: little-endian bytes in events, NumPy views in programs, no copy between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from .errors import InvalidEvent


@dataclass(frozen=True)
class Packed:
    """Marks a bytes field of an event as an array: `dtype` little-endian, `width` columns."""

    dtype: str
    width: int = 1


Int32s = Annotated[bytes, Packed("<i4")]
Float32s = Annotated[bytes, Packed("<f4")]
Uint8s = Annotated[bytes, Packed("|u1")]
Runs = Annotated[bytes, Packed("<i4", width=2)]


def pack_ints(values: npt.ArrayLike) -> bytes:
    """Token ids or other integers of any shape -> int32 little-endian bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def pack_floats(values: npt.ArrayLike) -> bytes:
    """Log-probabilities or rewards -> float32 little-endian bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def pack_mask(values: npt.ArrayLike) -> bytes:
    """0/1 or booleans -> uint8 bytes."""
    return np.asarray(values, dtype="|u1").tobytes()


def ints(packed: bytes) -> npt.NDArray[np.int32]:
    """View of int32 [T]. Raises InvalidEvent when the bytes are no whole number of values."""
    return _view(packed, "<i4")


def floats(packed: bytes) -> npt.NDArray[np.float32]:
    """View of float32 [T]."""
    return _view(packed, "<f4")


def mask(packed: bytes) -> npt.NDArray[np.uint8]:
    """View of uint8 [T]."""
    return _view(packed, "|u1")


def runs(packed: bytes) -> npt.NDArray[np.int32]:
    """View of int32 [R, 2]: (value, count) a row."""
    values = _view(packed, "<i4")
    if len(values) % 2:
        raise InvalidEvent(f"{len(values)} numbers are no (value, count) pairs")
    return values.reshape(-1, 2)


def pack_runs(values: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """One value a token -> run-length pairs (value, count) as bytes; length 0 gives b""."""
    array = np.asarray(values, dtype="<i4")
    if not len(array):
        return b""
    starts = np.flatnonzero(np.concatenate(([True], array[1:] != array[:-1])))
    counts = np.diff(np.append(starts, len(array)))
    return np.stack([array[starts], counts], axis=1).astype("<i4").tobytes()


def unpack_runs(packed: bytes) -> npt.NDArray[np.int32]:
    """Run-length pairs -> one value a token, int32 [T]."""
    pairs = runs(packed)
    return np.repeat(pairs[:, 0], pairs[:, 1])


def run_bounds(packed: Iterable[bytes]) -> tuple[int, int]:
    """Smallest and largest value of several run-length arrays; (-1, -1) when all are empty."""
    values = [v for p in packed for v in runs(p)[:, 0].tolist()]
    return (min(values), max(values)) if values else (-1, -1)


def _view(packed: bytes, dtype: str) -> npt.NDArray[np.generic]:
    size = np.dtype(dtype).itemsize
    if len(packed) % size:
        raise InvalidEvent(f"{len(packed)} bytes are no whole number of {size}-byte values")
    return np.frombuffer(packed, dtype=dtype)
