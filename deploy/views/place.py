"""Finding a run's log and the stage that a command is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import ConfigError, LogError, UnknownTopic
from ...schemas.topics import CATALOGUE
from ...streams.log import Log
from ...streams.registry import unknown
from ..plan import Run, Stage, plan, sqlite_path


@dataclass(frozen=True)
class Place:
    """A run's open log and one stage of it."""

    run: Run
    stage: Stage
    log: Log

    @property
    def started(self) -> list[Stage]:
        """Stages that have topics, in order."""
        return [s for s in self.run.stages if has_topics(self.log, s)]


@contextmanager
def opened(config_path: str, stage_name: str | None) -> Iterator[Place]:
    """The log of a run that exists, closed at the end. Without a name: the stage it is in.

    Raises:
        LogError: the run was never started, so there is no log to read.
    """
    run = plan(config_path)
    path = sqlite_path(run.log_url)
    if path is not None and not _is_there(path):
        raise LogError(
            f"{path}: no log there yet. Start the run first: streamrft run --config {config_path}"
        )
    with closing(run.open_log()) as log:
        stage = current_stage(log, run) if stage_name is None else run.stage(stage_name)
        if not has_topics(log, stage):
            raise LogError(f"{run.log_url}: no topics of {stage.namespace} there yet.")
        yield Place(run, stage, log)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise LogError(f"{path}: cannot be looked at: {error.strerror}") from error


def current_stage(log: Log, run: Run) -> Stage:
    """The stage that a run is in: the last that was started, else the first that has topics."""
    made = [stage for stage in run.stages if has_topics(log, stage)]
    started = [stage for stage in made if was_started(log, stage)]
    return (started[-1:] or made[:1] or [run.stages[0]])[0]


def was_started(log: Log, stage: Stage) -> bool:
    """Whether a process of a stage ever wrote; its topics may be made long before."""
    names = [stage.topics.name(topic) for topic in ("tasks", "checkpoints", "heartbeats")]
    try:
        return any(any(info.end.values()) for info in log.describe(names).values())
    except UnknownTopic:
        return False


def has_topics(log: Log, stage: Stage) -> bool:
    """Whether the topics of a stage are there."""
    try:
        log.describe([stage.topics.name("tasks")])
    except UnknownTopic:
        return False
    return True


def catalogue_name(stage: Stage, topic: str) -> str:
    """The catalogue's name of a topic given by it or in full.

    Raises:
        ConfigError: no such topic.
    """
    short = stage.topics.short(topic)
    if short not in CATALOGUE:
        raise ConfigError(unknown("topic", topic, CATALOGUE))
    return short
