"""From any path to the checkpoints that it means: a job, a step, a part of one, a single shard."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ConvertFailed

ROLES = ("actor", "critic")
_STEP = re.compile(r"global_step_(\d+)(?:\.epoch_\d+)?\Z")
_SHARD = re.compile(r"model_world_size_\d+_rank_\d+\.pt\Z")


@dataclass(frozen=True)
class Found:
    """One model of one step: `folder` holds its shards, and its `huggingface/` beside them.

    `step_folder` is None for shards that lie in no global_step_N.
    """

    role: str
    folder: Path
    step_folder: Path | None


def find(path: Path, *, steps: Sequence[int] = (), with_critic: bool = False) -> list[Found]:
    """Every model that `path` asks for, by step.

    Raises:
        ConvertFailed: no such path, nothing under it, or a step that is not there.
    """
    start = Path(os.path.abspath(path))
    if not start.exists():
        raise ConvertFailed(f"{path}: is not there. Name a job, a global_step_N, or a part of one.")
    folder = start.parent if start.is_file() else start
    above = next((f for f in (folder, *folder.parents) if _STEP.match(f.name)), None)
    is_critic = above is not None and folder.relative_to(above).parts[:1] == ("critic",)
    if above is not None and not steps:
        step_folders = [above]
    else:
        step_folders = _below(above.parent if above else folder)
    if not step_folders and not steps and (role := _bare_role(folder)):
        return [Found(role, folder, None)]
    chosen = _chosen(step_folders, steps, path)
    if is_critic:
        return [_part(f, "critic") for f in chosen]
    is_named = above is not None or bool(steps)
    found = [_part(f, role) for f in chosen for role in (ROLES if with_critic else ROLES[:1])]
    return found if is_named or not with_critic else _there(found, path)


def _there(found: Sequence[Found], path: Path) -> list[Found]:
    """Without the critics of steps that have none, as those that only served weights."""
    there = [f for f in found if f.role == "actor" or f.folder.is_dir()]
    if all(f.role == "actor" for f in there):
        raise ConvertFailed(f"{path}: no step has a critic. Leave out --critic.")
    return there


def step_of(folder: Path) -> int:
    """N of global_step_N."""
    match = _STEP.match(folder.name)
    assert match is not None
    return int(match[1])


def _below(folder: Path) -> list[Path]:
    """Step folders at any depth, lowest step first within each job or branch."""
    found = []
    for parent, names, _ in os.walk(folder):
        steps = [n for n in names if _STEP.match(n)]
        found += [Path(parent, n) for n in steps]
        names[:] = sorted(n for n in names if n not in steps)
    return sorted(found, key=lambda f: (str(f.parent), step_of(f), f.name))


def _chosen(folders: Sequence[Path], steps: Sequence[int], path: Path) -> list[Path]:
    if not folders:
        raise ConvertFailed(
            f"{path}: no global_step_N lies there, and no shards. Name a job's folder "
            "(checkpoint_root_dir/project/name) or a path inside one."
        )
    there = sorted({step_of(f) for f in folders})
    if missing := sorted(set(steps) - set(there)):
        raise ConvertFailed(
            f"{path}: step {missing[0]} is not there; found {_listed(there)}. Change --step."
        )
    return [f for f in folders if not steps or step_of(f) in steps]


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(str(s) for s in steps[-8:])
    return shown if len(steps) <= 8 else f"{len(steps)} steps, the last {shown}"


def _part(step_folder: Path, role: str) -> Found:
    folder = step_folder / role
    if role == "actor" and not folder.is_dir():
        folder = step_folder
    return Found(role, folder, step_folder)


def _bare_role(folder: Path) -> str:
    """The role of a folder of shards that somebody took out of its step; empty when it is none."""
    if not any(_marks(folder)):
        return ""
    return "critic" if folder.name == "critic" else "actor"


def _marks(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if _SHARD.match(entry.name) or entry.name == ".metadata":
            yield entry
        elif entry.is_dir() and (entry / ".metadata").is_file():
            yield entry
