"""A run as it will be started: folders, log, topics, and each stage's roles with their settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..consumers.settings import TrainerSettings
from ..producers.settings import ExplorerSettings, SchedulerSettings
from ..schemas.errors import ConfigError
from ..streams.settings import StreamSettings
from .config.checks import rolls_out, uses_sft
from .config.load import load
from .config.rollout import explorer_settings, scheduler_settings, stream_settings
from .config.schema import Config, StageConfig
from .config.training import trainer_settings

if TYPE_CHECKING:
    from ..schemas.topics import Topics
    from ..streams.log import Limits, Log, TopicSpec

DEFAULT_PARTITIONS = 4


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a stage: its command and its name, unique in the run."""

    command: str
    name: str


@dataclass(frozen=True)
class Stage:
    """One stage; settings are None for roles that its mode does not have.

    `after` names the stage whose last weights this one starts from.
    """

    name: str
    config: Config
    job_dir: Path
    namespace: str
    scheduler: SchedulerSettings | None
    explorer: ExplorerSettings | None
    streams: StreamSettings | None
    trainer: TrainerSettings | None
    after: Stage | None = None

    @property
    def topics(self) -> Topics:
        """Its topic names."""
        from ..schemas.topics import Topics

        config = self.config
        given = config.streams.partitions or config.event_log.partitions
        return Topics(self.namespace, given or DEFAULT_PARTITIONS)

    @property
    def is_sft(self) -> bool:
        """Whether the trainer imitates rows of a file."""
        return uses_sft(self.config)

    @property
    def commands(self) -> list[str]:
        """Commands of its roles, each once."""
        return list(dict.fromkeys(spec.command for spec in self.processes()))

    def processes(self) -> list[ProcessSpec]:
        """Its processes in the order in which they are started."""
        config, found = self.config, []
        if self.trainer:
            found.append(ProcessSpec("train", config.trainer.name))
        if self.scheduler:
            found.append(ProcessSpec("schedule", "scheduler"))
        if self.streams:
            found += [ProcessSpec("join", f"join-{i}") for i in range(config.streams.workers)]
        if self.explorer:
            num = config.explorer.rollout_model.engine_num
            found += [ProcessSpec("explore", f"{config.explorer.name}-{i}") for i in range(num)]
        return found


@dataclass(frozen=True)
class Run:
    """One run of one configuration file."""

    config_path: Path
    job_dir: Path
    namespace: str
    log_url: str
    stages: tuple[Stage, ...]
    warnings: tuple[str, ...]
    plugin_dirs: tuple[str, ...]

    @property
    def config(self) -> Config:
        """What holds for the whole run; the first stage has it too."""
        return self.stages[0].config

    def stage(self, name: str | None) -> Stage:
        """The stage called `name`; the only one when None.

        Raises:
            ConfigError: no such stage, or several and none named.
        """
        names = [stage.name for stage in self.stages]
        if name is None and len(names) == 1:
            return self.stages[0]
        for stage in self.stages:
            if stage.name == name:
                return stage
        if name is None:
            raise ConfigError(f"--stage: missing; name one of {', '.join(names)}.")
        listed = ", ".join(names) if names != [""] else "none: the run has no stages"
        raise ConfigError(f"--stage: {name!r} found; stages of {self.config_path} are {listed}.")

    def open_log(self) -> Log:
        """A connection of the caller's thread. The job folder is made when it is missing.

        Raises:
            ConfigError: the folder cannot be made.
            LogError: the log cannot be opened.
        """
        from ..streams.log import open_log

        path = sqlite_path(self.log_url)
        _make_folder(self.job_dir if path is None else path.parent)
        return open_log(self.log_url, self.limits)

    @property
    def limits(self) -> Limits:
        """What its log enforces."""
        return _limits(self.config)

    def topic_specs(self, stage: Stage) -> list[TopicSpec]:
        """The topics of a stage, with the retention that the file asks for."""
        from ..streams.log import topic_specs

        events = self.config.event_log
        retention: dict[str, int | None] = dict(events.retention)
        if "trajectories" in retention:
            retention.setdefault("clock", retention["trajectories"])
        return topic_specs(
            stage.topics, retention_ms=retention, max_event_bytes=events.max_event_bytes
        )


def plan(config_path: str | Path, plugin_dirs: tuple[str, ...] = ()) -> Run:
    """Load a configuration file and derive everything that its processes are told.

    Raises:
        ConfigError: see `config.load`.
    """
    loaded = load(config_path)
    config = loaded.stages[0].config
    root = Path(config.checkpoint_root_dir or "checkpoints").expanduser().resolve()
    job_dir = root.joinpath(config.project, config.group, config.name)
    dirs = tuple(str(Path(d).resolve()) for d in (*plugin_dirs, *_plugin_dirs_of_environment()))
    stages: list[Stage] = []
    for part in loaded.stages:
        try:
            stages.append(_stage(part, job_dir, stages[-1] if stages else None))
        except ConfigError as error:
            raise ConfigError(
                f"stages[{part.name}]: {error}" if part.name else str(error)
            ) from None
    url = config.event_log.url or f"sqlite:///{job_dir / 'log.db'}"
    _check_kafka(url, config)
    return Run(loaded.path, job_dir, _namespace(config), url, tuple(stages), loaded.warnings, dirs)


def starting_from(stage: Stage, model_path: str, adapter: str | None = None) -> Stage:
    """The stage with the weights that the stage before it left: a model, and an adapter over it.

    An adapter goes on where this stage trains one, else it is merged.
    """
    trainer = stage.trainer
    assert trainer is not None
    if adapter is not None:
        trainer = replace(trainer, start_adapter=adapter)
    elif trainer.lora is not None:
        trainer = replace(trainer, lora=replace(trainer.lora, base_model_name=model_path))
    return replace(stage, trainer=replace(trainer, model_path=model_path))


def sqlite_path(url: str) -> Path | None:
    """File of an embedded log; None for another kind."""
    prefix = "sqlite:///"
    return Path(url.removeprefix(prefix)) if url.startswith(prefix) else None


def _limits(config: Config) -> Limits:
    from ..streams.log import Limits

    events = config.event_log
    options = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in events.options.items()
    }
    return Limits(max_event_bytes=events.max_event_bytes, options=options)


def _check_kafka(url: str, config: Config) -> None:
    """What Kafka would refuse later: an address, an option, a name."""
    if not url.startswith("kafka://"):
        return
    from ..streams.kafka.options import Options

    Options.of(url, _limits(config))
    if ":" in _namespace(config):
        raise ConfigError(
            f"project, group and name give the topic namespace {_namespace(config)!r}; Kafka "
            "allows letters, digits, '.', '_' and '-' in names of topics."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}). Set checkpoint_root_dir or event_log to "
            "a place that can be written."
        ) from error


def _stage(part: StageConfig, job_dir: Path, before: Stage | None) -> Stage:
    config = part.config
    own, prefix = _own_names(config), _namespace(config)
    storage = "/".join((config.storage.uri.rstrip("/"), *own)) if config.storage.uri else None
    folder = job_dir / part.name if part.name else job_dir
    checkpoint_uri = "/".join(filter(None, (storage, part.name))) if storage else str(folder)
    rolls, trains = rolls_out(config), config.mode != "explore"
    return Stage(
        name=part.name,
        config=config,
        job_dir=folder,
        namespace=f"{prefix}.{part.name}" if part.name else prefix,
        scheduler=scheduler_settings(part) if rolls else None,
        explorer=explorer_settings(part, storage or str(job_dir)) if rolls else None,
        streams=stream_settings(part) if rolls else None,
        trainer=trainer_settings(part, checkpoint_uri) if trains else None,
        after=before,
    )


def _own_names(config: Config) -> tuple[str, ...]:
    return (config.project, *filter(None, (config.group,)), config.name)


def _namespace(config: Config) -> str:
    return config.ray_namespace or ".".join(_own_names(config))


def _plugin_dirs_of_environment() -> Mapping[str, None]:
    named = os.environ.get("TRINITY_PLUGIN_DIRS", "").split(os.pathsep)
    return dict.fromkeys(d for d in named if d)
