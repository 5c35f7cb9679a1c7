"""Sharded checkpoints to Hugging Face folders: what is asked for, one model after the other.

One model: what lies there -> what it must become -> the plan -> pieces -> manifest -> rename.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ...streams.weights.object_storage import WEIGHTS_FILE
from ..manifest import Manifest as StepManifest
from .adapters import MergedAdapter, base_folder, is_adapter
from .errors import ConvertFailed
from .find import Found, find
from .layout import Layout, Piece, Source
from .placing import (
    FOLDER,
    MANIFEST,
    FileEntry,
    changed_files,
    held,
    is_current,
    keep_others,
    read_manifest,
    staged,
    write_manifest,
)
from .sources import detect
from .target import CONFIG, Target, read_target, small_files
from .weights import Plan, WeightsWriter, as_bytes, read_shapes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Request:
    """What to convert.

    Args:
        path: a job, a step, or a path inside one.
        base: Hugging Face folder for the config and tokenizer that a checkpoint lacks.
        steps: only these; empty for all under `path`.
        with_critic: the critics too.
        dtype: of floating weights; None keeps that of the shards.
    """

    path: Path
    base: Path | None = None
    steps: tuple[int, ...] = ()
    with_critic: bool = False
    dtype: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one model: `folder` is the Hugging Face folder, `detail` says more."""

    state: Literal["converted", "present", "failed"]
    folder: Path
    detail: str


def convert(request: Request) -> Iterator[Outcome]:
    """Convert one model after the other; a failed one does not keep the rest from it.

    Raises:
        ConvertFailed: nothing of what was asked for is there.
    """
    for found in find(request.path, steps=request.steps, with_critic=request.with_critic):
        try:
            if not found.folder.is_dir():
                raise ConvertFailed(f"{found.folder}: is not there; this step has no critic.")
            with held(found.folder):
                yield _one(found, request)
        except ConvertFailed as error:
            yield Outcome("failed", found.folder / FOLDER, str(error))
        except OSError as error:
            where = error.filename or found.folder
            detail = f"{where}: {error.strerror or error}. Nothing was left half written."
            yield Outcome("failed", found.folder / FOLDER, detail)


def _one(found: Found, request: Request) -> Outcome:
    target_folder = found.folder / FOLDER
    manifest = read_manifest(target_folder)
    is_same = manifest is not None and manifest.dtype == (request.dtype or "")
    if (
        manifest is not None
        and is_same
        and is_current(manifest, found.folder)
        and not _lacks(target_folder, request.base)
    ):
        return Outcome("present", target_folder, f"as {MANIFEST} says")
    if _is_own(found):
        return Outcome("present", target_folder, "saved as a Hugging Face folder")
    if is_adapter(found, is_converted=manifest is not None):
        return _merged(found, request)
    opener = detect(found.folder)
    if opener is None:
        return _without_shards(found, request, target_folder)
    small = small_files(target_folder, request.base)
    target = read_target(small[CONFIG], found.role)
    if manifest is None and request.dtype is None and _is_whole(target_folder, target):
        return Outcome("present", target_folder, "a whole model was there")
    _check_base(request.base, target, found.role)
    source = opener(target)
    return _write(found, source, target, small, request)


def _merged(found: Found, request: Request) -> Outcome:
    base, doubt = base_folder(found, request.base)
    small = small_files(base, request.base)
    target = read_target(small[CONFIG], found.role)
    _check_base(request.base, target, found.role)
    merged = _write(found, MergedAdapter(found.folder, base, target), target, small, request)
    return replace(merged, detail=merged.detail + doubt)


def _lacks(folder: Path, base: Path | None) -> bool:
    """Whether the base has small files, such as a tokenizer, that the folder has not."""
    return base is not None and any(
        not (folder / name).is_file() for name in small_files(folder, base)
    )


def _is_own(found: Found) -> bool:
    """Whether the trainer saved this step with its Hugging Face folder, whole by its manifest."""
    if found.step_folder is None:
        return False
    path = found.step_folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=StepManifest)
    except FileNotFoundError:
        return False
    except msgspec.DecodeError as error:
        raise ConvertFailed(f"{path}: cannot be read ({error}). Copy the step again.") from error
    prefix = f"{found.role}/{FOLDER}/"
    files = {
        n: FileEntry(f.size, f.sha256) for n, f in manifest.files.items() if n.startswith(prefix)
    }
    if f"{prefix}{WEIGHTS_FILE}" not in files:
        return False
    if wrong := changed_files(files, found.step_folder):
        raise ConvertFailed(f"{wrong}. Copy the step again, or convert another.")
    return True


def _without_shards(found: Found, request: Request, folder: Path) -> Outcome:
    """A folder that nothing can be made from may still hold a whole model."""
    if not read_shapes(folder):
        raise ConvertFailed(
            f"{found.folder}: holds no shards (model_world_size_W_rank_R.pt, DCP, Megatron "
            "dist_ckpt) and no Hugging Face weights. Name a folder of a saved step."
        )
    small = small_files(folder, None)
    target = read_target(small[CONFIG], found.role)
    if not _is_whole(folder, target, is_strict=True):
        raise ConvertFailed(
            f"{folder}: its weights are not those of its {CONFIG}, and there are no shards to "
            "make them from."
        )
    return Outcome("present", folder, "a whole model was there")


def _is_whole(folder: Path, target: Target, *, is_strict: bool = False) -> bool:
    """Whether the headers of a folder's safetensors have every tensor of the model."""
    try:
        there = read_shapes(folder)
    except ConvertFailed:
        if is_strict:
            raise
        return False
    shapes = {n: shape for n, (shape, _) in there.items() if n not in target.tied}
    return target.config.parent == folder and shapes == dict(target.shapes)


def _check_base(base: Path | None, target: Target, role: str) -> None:
    """A base that is another model is refused, even where only its tokenizer is taken."""
    if base is None or not (config := base / CONFIG).is_file() or config == target.config:
        return
    other = read_target(config, role)
    for name in {**target.shapes, **other.shapes}:
        if (own := target.shapes.get(name)) != (theirs := other.shapes.get(name)):
            raise ConvertFailed(
                f"{config}: gives {name} {theirs or 'no place'}, {target.config} gives it "
                f"{own or 'no place'}. Name the model that was trained with --base-model-dir."
            )


def _write(
    found: Found, source: Source, target: Target, small: Mapping[str, Path], request: Request
) -> Outcome:
    layouts = source.layouts()
    plans = _plans(layouts, target, request.dtype)
    with staged(found.folder) as folder:
        for name, path in small.items():
            content = path.read_bytes()
            is_config = name == CONFIG
            (folder / name).write_bytes(_config(target, found, plans) if is_config else content)
        ties = _Ties(target)
        with WeightsWriter(folder, plans) as writer:
            for piece in source.pieces():
                ties.note(piece)
                if piece.name in plans and layouts[piece.name].boxes[piece.box] == piece.path:
                    writer.write(piece.name, piece.box, piece.tensor)
        ties.check(source)
        keep_others(found.folder / FOLDER, folder)
        write_manifest(
            folder,
            converted_from=source.kind,
            dtype=request.dtype or "",
            sources=source.files,
            root=found.folder,
        )
    return Outcome("converted", found.folder / FOLDER, _told(source, plans, small))


def _told(source: Source, plans: Mapping[str, Plan], small: Mapping[str, Path]) -> str:
    size_mb = sum(p.size_bytes for p in plans.values()) / 1e6
    text = f"{source.kind}, {len(source.files)} files, {len(plans)} tensors, {size_mb:,.1f} MB"
    if not any(name.startswith("tokenizer") for name in small):
        text += "; without a tokenizer, which --base-model-dir can give"
    return text


def _plans(layouts: Mapping[str, Layout], target: Target, dtype: str | None) -> dict[str, Plan]:
    """What is written, in the model's order.

    Raises:
        ConvertFailed: a tensor that is not whole, or of another shape than the model's.
    """
    plans = {}
    for name, layout in layouts.items():
        layout.check(name)
        shape = target.shapes.get(name) or target.shapes[target.tied[name]]
        flat = (torch.Size(shape).numel(),)
        if layout.shape not in (shape, flat):
            raise ConvertFailed(
                f"{next(iter(layout.boxes.values()))}: {name} is {layout.shape}, the model of "
                f"{target.config} has {shape}. Name the model that was trained with "
                "--base-model-dir."
            )
        is_cast = dtype is not None and layout.dtype.is_floating_point
        chosen = DTYPES[dtype] if dtype is not None and is_cast else layout.dtype
        plans[name] = Plan(shape, layout.shape, chosen)
    return {name: plans[name] for name in target.shapes}


def _config(target: Target, found: Found, plans: Mapping[str, Plan]) -> bytes:
    """config.json with the dtype that the weights have: transformers loads in what it names."""
    values = {**target.values, "architectures": [target.architecture]}
    floating = [p.dtype for p in plans.values() if p.dtype.is_floating_point]
    widest = max(floating, key=lambda d: (d.itemsize, str(d)))
    key = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
    values[key] = str(widest).removeprefix("torch.")
    if found.role == "critic":
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return json.dumps(values, indent=2).encode() + b"\n"


class _Ties:
    """Compares the two names of tied tensors piece by piece; only digests are kept."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._names = {*target.tied, *target.tied.values()}
        self._digests: dict[str, dict[object, bytes]] = {}

    def note(self, piece: Piece) -> None:
        """Keep the digest of a piece that has a second name."""
        if piece.name in self._names:
            digest = hashlib.blake2b(as_bytes(piece.tensor), digest_size=16).digest()
            self._digests.setdefault(piece.name, {})[piece.box] = digest

    def check(self, source: Source) -> None:
        """Raise ConvertFailed when two names of one tensor have different weights."""
        for alias, name in self._target.tied.items():
            if self._digests.get(alias, self._digests[name]) != self._digests[name]:
                raise ConvertFailed(
                    f"{source.files[-1]}: {alias} and {name} differ, but {self._target.config} "
                    "ties them. Name the model that was trained with --base-model-dir, or set "
                    "tie_word_embeddings to false."
                )
