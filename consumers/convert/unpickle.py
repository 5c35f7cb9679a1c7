"""Pickles of strangers: tensors and names are read from them, no code of theirs is run.

torch's own `weights_only` reader takes a fixed list of names and nothing else. What a sharded
tensor needs beyond that list is given inert classes here, which only keep what they are handed; so
no process group, device mesh or version of torch that made a file is needed to read it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from .errors import ConvertFailed

_INERT = (
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    *(
        f"torch.distributed.{module}.{name}"
        for module in ("tensor._dtensor_spec", "_tensor._dtensor_spec")
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    ),
    *(
        f"torch.distributed.{module}.placement_types.{name}"
        for module in ("tensor", "_tensor")
        for name in ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
    ),
)
_DTENSOR = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
)
_TENSOR_PARTS = (
    "torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.device_mesh.",
    "torch.distributed._mesh_layout.", "torch.distributed._pycute.",
)  # fmt: skip
_READING = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)
# inert as well; Megatron-core keeps the plans of its saves in there too
_METADATA = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
_PLAIN: dict[str, Any] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
    "collections.OrderedDict": dict,
    "torch.Size": tuple,
    "torch.serialization._get_layout": str,
}


class Inert:
    """Keeps what a pickle hands it, as attributes, `state` or `arguments`, and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # classes with slots hand over their __dict__ and their slots
        is_pair = isinstance(state, tuple) and len(state) == 2
        for part in state if is_pair else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)
            elif part is not None:
                self.state = part

    @property
    def kind(self) -> str:
        """The name of the class that this stands for."""
        return type(self).__name__


class ShardedTensor(torch.Tensor):
    """Stands for a DTensor: `shape` and `dtype` of the whole, the rank's piece in _local_tensor."""

    _local_tensor: torch.Tensor
    _spec: Any

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # pragma: no cover
        """Nothing is ever computed with it."""
        raise TypeError(f"{func} of a stand-in")


# Python 3.11 before 3.11.4 writes a member of an enum as getattr(class, name); nothing is looked up
_PLAIN["builtins.getattr"] = Inert


@cache
def _stand_in(path: str) -> type[Inert]:
    return type(path.rpartition(".")[2], (Inert,), {})


@contextmanager
def _only_ours(inert: frozenset[str]) -> Iterator[None]:
    """Lay aside what libraries allowed torch's reader, such as the real DTensor, for this call."""
    theirs = get_safe_globals()
    ours: list[Any] = [(_stand_in(path), path) for path in inert]
    clear_safe_globals()
    add_safe_globals([*ours, *((ShardedTensor, path) for path in _DTENSOR)])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(theirs)


def load_tensors(path: Path, content: IO[bytes] | None = None) -> Any:
    """What torch.save wrote, tensors on the CPU; those of a whole file are mapped, not read.

    Args:
        path: the file; errors name it.
        content: a part of the file, read instead of the whole.

    Raises:
        ConvertFailed: missing, cut, unreadable, or a pickle that names anything but tensors.
    """
    known = set(_INERT)
    while True:
        try:
            return _load(path if content is None else content, frozenset(known))
        except pickle.UnpicklingError as error:
            asked = _asked(error)
            if not asked.startswith(_TENSOR_PARTS) or asked in known:
                raise ConvertFailed(_refusal(path, asked, error)) from error
            # a class that another version of torch keeps beside its sharded tensors
            known.add(asked)
            if content is not None:
                content.seek(0)
        except _READING as error:
            raise ConvertFailed(_broken(path, error)) from error


def _load(source: Any, inert: frozenset[str]) -> Any:
    with _only_ours(inert):
        is_mapped = isinstance(source, Path)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)


class _MetadataReader(pickle.Unpickler):
    """Reads `.metadata`: every name that it may call is inert or a plain container."""

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path.startswith(_METADATA):
            return _stand_in(path)
        if path in _PLAIN:
            return _PLAIN[path]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name.endswith("Path") and "." not in name:
            return _stand_in("pathlib.Path")
        raise pickle.UnpicklingError(f"GLOBAL {path}")


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a torch.distributed.checkpoint folder.

    Raises:
        ConvertFailed: missing, cut, or a pickle that names anything but that format's classes.
    """
    try:
        with path.open("rb") as file:
            return _MetadataReader(file).load()
    except pickle.UnpicklingError as error:
        raise ConvertFailed(_refusal(path, _asked(error), error)) from error
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise ConvertFailed(_broken(path, error)) from error


def _asked(error: pickle.UnpicklingError) -> str:
    """The name that a pickle was not given; empty when that was not the matter."""
    _, found, rest = str(error).partition("GLOBAL ")
    return rest.split()[0] if found else ""


def _refusal(path: Path, asked: str, error: pickle.UnpicklingError) -> str:
    """Torch's own words, without its advice to trust the file."""
    if not asked:
        return _broken(path, error)
    if asked.startswith("torch.distributed._shard."):
        return (
            f"{path}: holds FSDP's old ShardedTensor; DTensor and plain tensors are allowed. Save "
            "with a device mesh (FSDP2), or as a DCP folder."
        )
    return (
        f"{path}: its pickle asks for {asked}, which is no part of a tensor; nothing of it was "
        "run. Do not load this file elsewhere, and fetch it again from where it was saved."
    )


def _broken(path: Path, error: object) -> str:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{path}: cannot be read ({why}). Copy the file again; its size may tell."
