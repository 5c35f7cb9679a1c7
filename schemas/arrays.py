"""Packed token arrays: little-endian bytes in events, NumPy views in programs, no copy between."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import InvalidEvent

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("|u1")
_PAIR = struct.Struct("<ii")
Scalar = TypeVar("Scalar", bound=np.generic)


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
    return _view(packed, _INT32)


def floats(packed: bytes) -> npt.NDArray[np.float32]:
    """View of float32 [T]."""
    return _view(packed, _FLOAT32)


def mask(packed: bytes) -> npt.NDArray[np.uint8]:
    """View of uint8 [T]."""
    return _view(packed, _UINT8)


def runs(packed: bytes) -> npt.NDArray[np.int32]:
    """int32 [R, 2]: (value, count) a row."""
    return np.array(run_pairs(packed), dtype=_INT32).reshape(-1, 2)


def run_pairs(packed: bytes) -> list[tuple[int, int]]:
    """The rows of `runs` as (value, count) tuples: a record has few, so this is the faster form."""
    if len(packed) % _PAIR.size:
        raise InvalidEvent(f"{len(packed)} bytes are no (value, count) pairs of {_PAIR.size} bytes")
    return list(_PAIR.iter_unpack(packed))


def all_finite(packed: bytes) -> bool:
    """Whether no float32 is an infinity or NaN."""
    return b"\x00" not in np.isfinite(_view(packed, _FLOAT32)).tobytes()


def pack_runs(values: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """One value a token -> run-length pairs (value, count) as bytes; length 0 gives b""."""
    array: npt.NDArray[np.int32] = np.asarray(values, dtype=_INT32)
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
    values = [value for p in packed for value, _ in run_pairs(p)]
    return (min(values), max(values)) if values else (-1, -1)


def _view(packed: bytes, dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    if len(packed) % dtype.itemsize:
        raise InvalidEvent(
            f"{len(packed)} bytes are no whole number of {dtype.itemsize}-byte values"
        )
    return np.frombuffer(packed, dtype=dtype)
