"""A LoRA checkpoint read as the model that it makes: the adapter merged into what lies below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...streams.blobs import sha256_file
from ...streams.weights import adapters
from ...streams.weights.object_storage import weights_path
from ..bases import BASE
from ..manifest import BaseModel, Manifest
from .boxes import whole
from .errors import ConvertFailed
from .find import Found
from .layout import Layout, Piece
from .placing import FOLDER
from .target import Target
from .weights import SINGLE, read_shapes

_ADAPTER = adapters.ADAPTER_FOLDER.rpartition("/")[2]


def is_adapter(found: Found, *, is_converted: bool) -> bool:
    """Whether an actor is an adapter; a whole model that others put beside it comes first."""
    if found.role != "actor" or not (found.folder / _ADAPTER / adapters.CONFIG_FILE).is_file():
        return False
    if is_converted or _recorded(found.step_folder) is not None:
        return True
    return not read_shapes(found.folder / FOLDER)


def base_folder(found: Found, given: Path | None) -> tuple[Path, str]:
    """The Hugging Face folder of the model below, and a doubt; empty where it is proved.

    It is the recorded one, proved by its SHA-256, else the one given, which may be the same model
    in other files.

    Raises:
        ConvertFailed: neither is there.
    """
    recorded = _recorded(found.step_folder)
    if recorded is not None:
        for folder in (*_places(recorded, found.step_folder), *([given] if given else [])):
            if (folder / SINGLE).is_file() and sha256_file(folder / SINGLE) == recorded.digest:
                return folder, ""
    if given is not None:
        doubt = f"; over {given}, whose {SINGLE} is not the one that was trained on"
        return given, "" if recorded is None else doubt
    missing = "names no model" if recorded is None else f"{recorded.uri} is not there, or another"
    raise ConvertFailed(
        f"{found.folder / _ADAPTER}: is a LoRA adapter, and the model below it {missing}. Name "
        "the model that the training started from with --base-model-dir."
    )


def _recorded(step_folder: Path | None) -> BaseModel | None:
    """What the manifest of this program's step says is below."""
    path = None if step_folder is None else step_folder / "manifest.json"
    if path is None or not path.is_file():
        return None
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise ConvertFailed(f"{path}: cannot be read ({error}). Copy the step again.") from error
    if manifest.base is not None:
        _check_digest(path.parent / weights_path(manifest.base), manifest.digest)
    return manifest.base


def _check_digest(path: Path, wanted: str) -> None:
    found = sha256_file(path) if path.is_file() else "missing"
    if found != wanted:
        raise ConvertFailed(
            f"{path}: SHA-256 is {found[:12]}, the step's manifest says {wanted[:12]}. Copy the "
            "step again, or convert another."
        )


def _places(base: BaseModel, step_folder: Path | None) -> Iterator[Path]:
    """Where it was saved; and beside the steps, or those of the parent, of a job that was moved."""
    assert step_folder is not None
    name = base.uri.rpartition("/")[2]
    for folder in (Path(base.uri), *(p / BASE / name for p in step_folder.parents[:2])):
        yield folder / "actor" / FOLDER


class MergedAdapter:
    """See Source. Holds the whole model in memory, in float32, as it was trained."""

    kind = "LoRA adapter"

    def __init__(self, folder: Path, base: Path, target: Target) -> None:
        """`folder` is the actor's, `base` the Hugging Face folder of the model below."""
        self._folder, self._base, self._target = folder / _ADAPTER, base, target
        names = (adapters.ADAPTER_FILE, adapters.CONFIG_FILE)
        self.files: Sequence[Path] = [self._folder / name for name in names]
        self._state: dict[str, torch.Tensor] = {}

    def layouts(self) -> dict[str, Layout]:
        """See Source. Loads and merges."""
        state = self._merged().state_dict()
        self._state = {n: state[n].contiguous() for n in self._target.shapes}
        path = self.files[0]
        return {
            name: Layout(tuple(tensor.shape), tensor.dtype, {whole(tuple(tensor.shape)): path})
            for name, tensor in self._state.items()
        }

    def pieces(self) -> Iterator[Piece]:
        """See Source; `layouts` comes first."""
        for name, tensor in self._state.items():
            yield Piece(name, whole(tuple(tensor.shape)), tensor, self.files[0])

    def _merged(self) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        try:
            network: Any = AutoModelForCausalLM.from_pretrained(
                self._base, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
            return adapters.merge(network, self._folder)
        except adapters.AdapterMismatch as error:
            raise ConvertFailed(str(error)) from error
        except (OSError, ValueError, RuntimeError) as error:  # transformers names no file
            why = " ".join(str(error).split())[:300]
            raise ConvertFailed(f"{self._base}: no model can be loaded ({why}).") from error
