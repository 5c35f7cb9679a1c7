"""One process of a run: prepare its surroundings, then hand over to the role itself."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..schemas.errors import ConfigError
from ..streams.faust.membership import THREAD as FAUST_THREAD
from ..streams.process import Process
from .handover import with_model
from .parent import PARENT_VARIABLE, die_with_parent
from .plan import Run, Stage, plan
from .plugins import load_plugins
from .preflight import check_extras, check_functions, check_model, check_places
from .ranks import followers, ignore_signals, is_follower

if TYPE_CHECKING:
    import faust

    from ..consumers.settings import TrainerSettings
    from ..streams.shell import MakeShell

logger = logging.getLogger("streamrft")

_NAMES = {"schedule": "scheduler", "explore": "explorer", "join": "join", "train": "trainer"}


def role_command(args: argparse.Namespace) -> int:
    """`streamrft schedule | explore | join | train`."""
    is_supervised = PARENT_VARIABLE in os.environ
    die_with_parent()
    run = plan(args.config, tuple(args.plugin_dir))
    stage = _with_engine(run.stage(args.stage), getattr(args, "engine", None))
    _check_role(stage, args.command)
    check_extras(stage, args.command)
    if not is_supervised:  # whoever started it has looked
        check_functions(run, [(stage, args.command)])
        check_places(stage, args.command)
    _log_to_stderr(run)
    name = args.name or own_name(args.command)
    if args.command == "train":
        _train(run, stage, name)
    else:
        run_role(run, stage, args.command, name)
    _leave_threads()
    return 0


def _train(run: Run, stage: Stage, name: str) -> None:
    """The trainer, which may be several processes; only rank 0 has a role in the run."""
    if is_follower():
        ignore_signals()
        load_plugins(run.plugin_dirs)
        from ..consumers.trainer import follow_trainer

        follow_trainer()
        return
    with followers(run, stage, name):
        run_role(run, stage, "train", name)


def _leave_threads() -> None:
    """End at once where a thread of Faust was left behind: Python's own end may wait for it."""
    if any(thread.name == FAUST_THREAD for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(0)


def own_name(command: str) -> str:
    """A name that no other process of the run has: in containers all numbers are alike."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{_NAMES[command]}-{host}-{os.getpid()}"


def run_role(
    run: Run,
    stage: Stage,
    command: str,
    name: str,
    on_process: Callable[[Process], None] = Process.stop_on_signals,
    make_shell: MakeShell | None = None,
) -> None:
    """Run one role in this process until its work is done or SIGTERM asks it to stop.

    `on_process` is told of the process before it works; `make_shell` makes the join's shell where
    its settings do not say it.

    Raises:
        ConfigError: the stage's mode has no such role.
        StreamrftError: what made the role fail, named.
    """
    _check_role(stage, command)
    log = run.open_log()
    try:
        log.ensure_topics(run.topic_specs(stage))
        process = Process(log, stage.topics, name=name, role=_NAMES[command])
        on_process(process)
        process.alive()
        load_plugins(run.plugin_dirs)
        _start(process, stage, command, make_shell)
        process.ended()
    finally:
        log.close()


class _HostedJoin:
    """The join role in a thread of a process that is Faust's."""

    def __init__(self, run: Run, stage: Stage, name: str) -> None:
        self._run, self._stage, self._name = run, stage, name
        self._process: Process | None = None
        self._is_stopped = False

    def work(self, make_shell: MakeShell) -> None:
        run_role(self._run, self._stage, "join", self._name, self._take, make_shell)

    def _take(self, process: Process) -> None:
        self._process = process
        if self._is_stopped:
            process.stop()

    def stop(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.stop()


def hosted_join() -> faust.App:
    """The join for `faust -A streamrft.streams.faust_app worker`, told by the environment.

    Raises:
        ConfigError: STREAMRFT_CONFIG is not set, or its log is not Kafka.
    """
    from ..streams.faust_app import hosted
    from ..streams.feeds import feed_type
    from ..streams.kafka.options import Options
    from ..streams.shell import GROUP

    path = os.environ.get("STREAMRFT_CONFIG")
    if not path:
        raise ConfigError("STREAMRFT_CONFIG: not set; name the run's YAML file in it.")
    run = plan(path)
    stage = _with_engine(run.stage(os.environ.get("STREAMRFT_STAGE")), "faust")
    _check_role(stage, "join")
    assert stage.streams is not None
    join = _HostedJoin(run, stage, os.environ.get("STREAMRFT_NAME") or own_name("join"))
    return hosted(
        Options.of(run.log_url, run.limits),
        f"{stage.topics.namespace}.{GROUP}",
        [stage.topics.name(topic) for topic in feed_type(stage.streams).topics],
        join.work,
        join.stop,
    )


def _with_engine(stage: Stage, engine: Literal["native", "faust"] | None) -> Stage:
    if engine is None or stage.streams is None:
        return stage
    return replace(stage, streams=replace(stage.streams, engine=engine))


def _start(
    process: Process, stage: Stage, command: str, make_shell: MakeShell | None = None
) -> None:
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

        run_join(process, stage.streams, make_shell)
    else:
        stage = with_model(process.log, stage)
        assert stage.trainer is not None
        check_model(stage.trainer.model_path)
        _run_trainer(process, stage.trainer)


def _run_trainer(process: Process, settings: TrainerSettings) -> None:
    from ..consumers.checkpoints import CheckpointFailed
    from ..consumers.trainer import run_trainer

    try:
        run_trainer(process, settings)
    except CheckpointFailed:
        process.ended()  # by itself: its SaveFailed event says why
        raise


def _check_role(stage: Stage, command: str) -> None:
    if command not in stage.commands:
        listed = ", ".join(sorted(stage.commands))
        raise ConfigError(f"mode: {stage.config.mode} has no role {command}; it has {listed}.")


def _log_to_stderr(run: Run) -> None:
    logging.basicConfig(
        level=run.config.log.level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(message)s",
    )
    logging.captureWarnings(True)
    # libraries below tell every request and compilation at INFO
    noisy = "httpx urllib3 filelock fsspec datasets torch botocore aiobotocore"
    fausts = "faust mode aiokafka streamrft.streams.faust"  # ours under the names of modules
    for name in f"{noisy} {fausts}".split():
        logging.getLogger(name).setLevel(logging.WARNING)
