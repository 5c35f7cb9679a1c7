"""One process of a run: prepare its surroundings, then hand over to the role itself."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import sys
import zlib
from pathlib import Path

from ..schemas.errors import ConfigError
from ..streams.process import Process
from .handover import with_model
from .parent import die_with_parent
from .plan import Run, Stage, plan

logger = logging.getLogger("streamrft")

_NAMES = {"schedule": "scheduler", "explore": "explorer", "join": "join", "train": "trainer"}


def role_command(args: argparse.Namespace) -> int:
    """`streamrft schedule | explore | join | train`."""
    die_with_parent()
    run = plan(args.config, tuple(args.plugin_dir))
    stage = run.stage(args.stage)
    _log_to_stderr(run)
    name = args.name or f"{_NAMES[args.command]}-{os.getpid()}"
    run_role(run, stage, args.command, name)
    return 0


def run_role(run: Run, stage: Stage, command: str, name: str) -> None:
    """Run one role in this process until its work is done or SIGTERM asks it to stop.

    Raises:
        ConfigError: the stage's mode has no such role.
        StreamrftError: what made the role fail, named.
    """
    _check_role(stage, command)
    log = run.open_log()
    try:
        log.ensure_topics(run.topic_specs(stage))
        process = Process(log, stage.topics, name=name, role=_NAMES[command])
        process.stop_on_signals()
        process.alive()
        load_plugins(run.plugin_dirs)
        _start(process, stage, command)
        process.ended()
    finally:
        log.close()


def load_plugins(folders: tuple[str, ...]) -> None:
    """Import every Python file of the folders, so that it registers what it defines.

    Raises:
        ConfigError: a folder is missing, or a file cannot be imported.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--plugin-dir: {folder} is no folder.")
        for path in sorted(Path(folder).glob("*.py")):
            _import_file(path)


def _start(process: Process, stage: Stage, command: str) -> None:
    if command == "schedule":
        assert stage.scheduler is not None
        from ..producers.scheduler import run_scheduler

        run_scheduler(process, stage.scheduler)
    elif command == "explore":
        assert stage.explorer is not None
        os.environ.update({k: str(v) for k, v in stage.config.explorer.env_vars.items()})
        from ..producers.explorer import run_explorer

        run_explorer(process, stage.explorer)
    elif command == "join":
        assert stage.streams is not None
        from ..streams.worker import run_join

        run_join(process, stage.streams)
    else:
        stage = with_model(process.log, stage)
        assert stage.trainer is not None
        _check_model(stage.trainer.model_path)
        from ..consumers.trainer import run_trainer

        run_trainer(process, stage.trainer)


def _check_model(path: str) -> None:
    """Refuse a folder that is missing here; a hub name has at most one slash and no dot first."""
    is_folder = path.startswith(("/", ".", "~")) or ("://" not in path and path.count("/") > 1)
    if is_folder and not Path(path).is_dir():
        raise ConfigError(
            f"model.model_path: {path} is no folder here (seen from {Path.cwd()}). Name a Hugging "
            "Face model folder, or a model of the hub such as Qwen/Qwen2.5-0.5B-Instruct."
        )


def _check_role(stage: Stage, command: str) -> None:
    present = {spec.command for spec in stage.processes()}
    if command not in present:
        raise ConfigError(
            f"mode: {stage.config.mode} has no role {command}; it has {', '.join(sorted(present))}."
        )


def _log_to_stderr(run: Run) -> None:
    logging.basicConfig(
        level=run.config.log.level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(message)s",
    )
    logging.captureWarnings(True)
    # libraries below tell every request and compilation at INFO
    for name in ("httpx", "urllib3", "filelock", "fsspec", "datasets", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _import_file(path: Path) -> None:
    # the folder is part of the name: two folders may hold files of one name
    name = f"streamrft_plugin_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises: it is named and ends the role
        del sys.modules[name]
        raise ConfigError(f"--plugin-dir: {path}: {type(error).__name__}: {error}") from error
