"""What would end a run after half a minute, found before anything is started.

Names of functions are looked up in the sources, which costs milliseconds. Where that does not
settle it (a name is not found, or is a dotted path) one short process imports the plug-ins and the
functions and answers for good, so that a name is never refused that a role would have found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..schemas.errors import ConfigError, MissingExtra
from ..streams.rows import check_place
from ..streams.shell import check_shell
from .config.adapters import check_peft
from .handover import last_trained
from .names import ERROR
from .parent import before_exec
from .plan import Run, Stage
from .plugins import plugin_files
from .written import entries_of

_ANSWER_S = 120.0
_LIBRARIES = ("torch", "transformers", "safetensors", "jinja2")
_ALGORITHM = {
    "advantage_fn": "ADVANTAGES",
    "policy_loss_fn": "POLICY_LOSSES",
    "kl_loss_fn": "KL_LOSSES",
    "kl_penalty_fn": "KL_LOSSES",
    "entropy_loss_fn": "ENTROPY_LOSSES",
}


@dataclass(frozen=True)
class _Named:
    """A function that a role will make: its registry, and what the configuration says."""

    family: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


def check_functions(run: Run, roles: Iterable[tuple[Stage, str]]) -> None:
    """Look for every plug-in folder and every function that these roles name.

    Args:
        run: with its plug-ins.
        roles: stages, each with the command of a role that it has.

    Raises:
        ConfigError: one is not there, or takes no such argument; says what there is.
    """
    plugins = tuple(plugin_files(run.plugin_dirs))
    entries = cache(lambda family: entries_of(family, plugins))
    doubtful = [
        (stage, command)
        for stage, command in roles
        if any(not _is_plain(named, entries(named.family)) for named in _named(stage, command))
    ]
    if doubtful:
        _ask(run, doubtful)


def check_extras(stage: Stage, command: str) -> None:
    """Raise MissingExtra where a role's libraries are not installed; nothing is imported."""
    if command in ("train", "explore"):
        for name in _LIBRARIES:
            if find_spec(name) is None:
                raise MissingExtra(f"{name}, which streamrft {command} needs,", "train")
        check_peft(stage.config)
    if command == "join" and stage.streams is not None:
        check_shell(stage.streams)


def check_places(stage: Stage, command: str) -> None:
    """Raise ConfigError where rows or a model that a role reads are not where the file says."""
    if command == "schedule" and stage.scheduler is not None:
        for taskset in stage.scheduler.tasksets:
            check_place(f"taskset {taskset.name!r}", taskset.path)
    if command == "train" and stage.trainer is not None:
        for rows in (stage.trainer.sft, stage.trainer.experts):
            if rows is not None:
                check_place("rows to train on", rows.path)
        if last_trained(stage.after) is None:
            check_model(stage.trainer.model_path)


def check_model(path: str) -> None:
    """Refuse a folder that is missing here; a hub name has at most one slash and no dot first."""
    is_folder = path.startswith(("/", ".", "~")) or ("://" not in path and path.count("/") > 1)
    if is_folder and not Path(path).is_dir():
        raise ConfigError(
            f"model.model_path: {path} is no folder here (seen from {Path.cwd()}). Name a Hugging "
            "Face model folder, or a model of the hub such as Qwen/Qwen2.5-0.5B-Instruct."
        )


def _is_plain(named: _Named, entries: Mapping[str, frozenset[str] | None]) -> bool:
    """Whether the sources settle that it can be made."""
    if named.name not in entries:
        return False
    known = entries[named.name]
    return known is None or named.args.keys() <= known


def _named(stage: Stage, command: str) -> Iterator[_Named]:
    # the scheduler makes none of its own: it may run where no plug-in and no torch is
    if command == "explore" and stage.explorer is not None:
        for t in stage.explorer.tasksets:
            yield _Named("WORKFLOWS", t.workflow, t.workflow_args)
            if t.reward_fn:
                yield _Named("REWARDS", t.reward_fn, t.reward_fn_args)
    if command == "join" and stage.streams is not None:
        for operator in stage.streams.filters:
            yield _Named("FILTERS", operator.name, operator.args)
        if priority := stage.streams.priority:
            yield _Named("PRIORITIES", priority.name, priority.args)
    if command == "train" and stage.trainer is not None:
        algorithm = stage.trainer.algorithm
        for key, family in _ALGORITHM.items():
            if chosen := getattr(algorithm, key):
                yield _Named(family, chosen.name, chosen.args)
        if algorithm.loss_agg_mode:
            yield _Named("AGGREGATIONS", algorithm.loss_agg_mode)


def _ask(run: Run, roles: Iterable[tuple[Stage, str]]) -> None:
    """Let a process of its own make the functions. Where it cannot answer the roles will."""
    words = [sys.executable, "-m", "streamrft.deploy.names", "--config", str(run.config_path)]
    for folder in run.plugin_dirs:
        words += ["--plugin-dir", folder]
    for stage, command in roles:
        words += ["--ask", stage.name, command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_ANSWER_S, preexec_fn=before_exec()
        )
    except subprocess.TimeoutExpired:
        return
    # a plug-in may print, too, also when the process ends
    errors = [line for line in done.stdout.splitlines() if line.startswith(ERROR)]
    if done.returncode == ConfigError.exit_code and errors:
        raise ConfigError(json.loads(errors[-1].removeprefix(ERROR)))
