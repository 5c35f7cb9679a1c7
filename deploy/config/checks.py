"""Rules across keys, checked at load: what would fail or stall hours later is an error now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ...producers.settings import Pacing
from ...schemas.errors import ConfigError
from .adapters import check_adapters
from .buffer import Taskset
from .ranges import check_ranges
from .schema import Config

# names become folders too, so none may mean this folder or the one above
_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]+\Z")
_SECRET = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|credentials?)\Z|^(.*(auth|access|api|hf|bearer)_)?token\Z",
    re.IGNORECASE,
)
SELECTORS = ("sequential", "shuffle", "random")
PREFERENCES = ("dpo", "kto")
_LATER_SELECTORS = ("offline_easy2hard", "difficulty_based")
_TOPICS_TO_JOIN = ("trajectories", "rewards")


def check(config: Config) -> None:
    """Raise ConfigError for the first rule that the configuration of one stage breaks."""
    _names(config)
    check_ranges(config)
    _mode(config)
    if rolls_out(config):
        _tasksets(config)
    _staleness(config)
    _rewards(config)
    _retention(config)
    _schedule(config)
    _engine(config)
    check_adapters(config)


def is_on_kafka(config: Config) -> bool:
    """Whether the log is Kafka's, not the embedded one."""
    return (config.event_log.url or "").startswith("kafka://")


def rolls_out(config: Config) -> bool:
    """Whether this stage runs tasks (all modes but `train`)."""
    return config.mode != "train"


def tasksets(config: Config) -> tuple[Taskset, ...]:
    """The training tasksets, from either key."""
    entry = config.buffer.explorer_input
    return entry.tasksets or ((entry.taskset,) if entry.taskset else ())


def _placed(config: Config) -> Iterator[tuple[str, Taskset]]:
    """The training tasksets, each with the path of its section."""
    is_list = bool(config.buffer.explorer_input.tasksets)
    for i, taskset in enumerate(tasksets(config)):
        yield f"buffer.explorer_input.{f'tasksets[{i}]' if is_list else 'taskset'}", taskset


def uses_sft(config: Config) -> bool:
    """Whether rows of a file are trained on instead of rollouts; preferences may be of either."""
    kind = config.algorithm.algorithm_type
    return kind in ("sft", "cpt") or (kind in PREFERENCES and _names_file(config))


def _names_file(config: Config) -> bool:
    source = config.buffer.trainer_input.experience_buffer
    return source is not None and source.storage_type == "file"


def check_secrets(raw: Mapping[str, Any], path: str = "") -> None:
    """Refuse secrets written into the file; `${oc.env:VAR}` reads them from the environment."""
    for key, value in raw.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            check_secrets(value, where)
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, Mapping):
                    check_secrets(entry, where)
        elif isinstance(value, str) and _is_secret(str(key), value):
            raise ConfigError(
                f"{where}: a secret stands in the file. Put it into the environment and write "
                f"${{oc.env:NAME}} here."
            )


def is_id(name: str) -> bool:
    """Whether a name may be part of topics and ids."""
    return bool(_ID.match(name))


def is_secret_name(key: str) -> bool:
    """Whether a key names a secret, so that its value is never shown."""
    return bool(_SECRET.search(key))


def _is_secret(key: str, value: str) -> bool:
    if "${" in value or value in ("", "EMPTY"):
        return False
    return is_secret_name(key) or ("://" in value and bool(urlsplit(value).password))


def _names(config: Config) -> None:
    names = {
        "project": config.project,
        "name": config.name,
        "group": config.group,
        "ray_namespace": config.ray_namespace,
        "branch": config.branch or "",
        "explorer.name": config.explorer.name,
        "trainer.name": config.trainer.name,
    }
    names |= {f"{where}.name": taskset.name for where, taskset in _placed(config)}
    for key, name in names.items():
        if name and not is_id(name):
            raise ConfigError(
                f"{key}: {name!r} found; topics and ids are made of it, so use only letters, "
                "digits and . _ : -, and not dots alone"
            )
    for key in ("project", "name"):
        if not names[key]:
            raise ConfigError(f"{key}: empty; give the run a name")


def _mode(config: Config) -> None:
    kind = config.algorithm.algorithm_type
    if config.mode in ("bench", "serve"):
        raise ConfigError(
            f"mode: {config.mode} is not in this version; both, explore and train are."
        )
    if uses_sft(config) and config.mode != "train":
        raise ConfigError(
            f"mode: {config.mode} with algorithm_type {kind}, which trains on rows of a file and "
            "rolls nothing out. Set mode: train."
        )
    if uses_sft(config):
        _sft(config)
    elif kind == "dpo":
        _pairs(config)
    elif config.mode == "train" and _names_file(config):
        raise ConfigError(
            "buffer.trainer_input.experience_buffer.storage_type: file found, but "
            f"{kind} trains rollouts on the log; sft, cpt, dpo and kto train rows of a file. Name "
            "one of them, or leave storage_type out."
        )
    if kind == "kto":
        _prompts(config)
    if config.mode != "explore" and not config.model.model_path:
        raise ConfigError("model.model_path: empty; name a model folder or a Hugging Face model.")


def _sft(config: Config) -> None:
    rows = config.buffer.trainer_input.experience_buffer
    kind = config.algorithm.algorithm_type
    if rows is None or rows.storage_type != "file" or not rows.path:
        raise ConfigError(
            f"buffer.trainer_input.experience_buffer: {kind} needs storage_type: file and a path."
        )
    if config.buffer.train_batch_size < 1:
        raise ConfigError(f"buffer.train_batch_size: {kind} needs it: rows a step.")


def _pairs(config: Config) -> None:
    """Of groups on the log."""
    if rolls_out(config) and config.algorithm.repeat_times < 2:
        raise ConfigError(
            "algorithm.repeat_times: 1 found; dpo compares the rollouts of a task, so at least 2 "
            "are allowed. For pairs of a file set mode: train and "
            "buffer.trainer_input.experience_buffer.storage_type: file."
        )


def _prompts(config: Config) -> None:
    size, group = config.buffer.train_batch_size, config.algorithm.repeat_times
    prompts = config.buffer.batch_size
    if size:
        prompts = size if uses_sft(config) else size // group
    if prompts < 2:
        raise ConfigError(
            f"buffer.{'train_batch_size' if size else 'batch_size'}: {prompts} prompts a step "
            "found; kto measures its baseline on answers to other prompts of the batch, so at "
            "least 2 are allowed."
        )


def _tasksets(config: Config) -> None:
    entry = config.buffer.explorer_input
    if entry.taskset is not None and entry.tasksets:
        raise ConfigError("buffer.explorer_input: taskset and tasksets found; give one of them.")
    if not tasksets(config):
        raise ConfigError(
            f"buffer.explorer_input.taskset: missing; mode {config.mode} needs tasks to roll out."
        )
    for where, taskset in _placed(config):
        if not taskset.name:
            raise ConfigError(f"{where}.name: missing; group ids are made of it.")
        if not taskset.path:
            raise ConfigError(f"{where}.path: missing; a file, a folder or a data set name.")
        if taskset.storage_type != "file":
            raise ConfigError(f"{where}.storage_type: sql is not in this version; file is.")
        selector = taskset.data_selector.selector_type
        if selector not in (*SELECTORS, *_LATER_SELECTORS):
            raise ConfigError(
                f"{where}.data_selector.selector_type: {selector!r} found; allowed are "
                f"{', '.join(SELECTORS)}."
            )
        if taskset.format.prompt_type == "chatpair":
            raise ConfigError(f"{where}.format.prompt_type: chatpair is for DPO, not for rollouts.")
    _unique("buffer.explorer_input.tasksets: name", (t.name for t in tasksets(config)))


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {name!r} is used twice; names must differ.")
        seen.add(name)


def pacing(config: Config) -> Pacing:
    """How far publishing may run ahead; the styles driven by one side become fully_async."""
    sync = config.synchronizer
    style = "fixed" if sync.sync_style == "fixed" else "fully_async"
    staleness = Pacing.max_staleness if sync.max_staleness is None else sync.max_staleness
    return Pacing(style, sync.sync_interval, sync.sync_offset, staleness)


def _staleness(config: Config) -> None:
    sync = config.synchronizer
    if sync.sync_style == "fixed":
        allowed = sync.sync_interval - 1 + sync.sync_offset
        if sync.max_staleness is not None and sync.max_staleness < allowed:
            raise ConfigError(
                f"synchronizer.max_staleness: {sync.max_staleness} found, but sync_interval "
                f"{sync.sync_interval} and sync_offset {sync.sync_offset} make trajectories up to "
                f"{allowed} steps old. Raise it to {allowed} or lower the others."
            )
    elif (found := pacing(config).allowed_staleness) < sync.sync_interval - 1:
        raise ConfigError(
            f"synchronizer.max_staleness: {found} found, below sync_interval - 1 = "
            f"{sync.sync_interval - 1}: weights come too seldom and the run would stall. Raise "
            "max_staleness or lower sync_interval."
        )


def _rewards(config: Config) -> None:
    streams = config.streams
    if streams.min_group_size > config.algorithm.repeat_times and rolls_out(config):
        raise ConfigError(
            f"streams.min_group_size: {streams.min_group_size} found, but groups have "
            f"algorithm.repeat_times = {config.algorithm.repeat_times} members."
        )
    for i, operator in enumerate(streams.filters):
        if not operator.name:
            raise ConfigError(f"streams.filters[{i}].name: missing; name a filter.")
    if config.streams.partitions and config.event_log.partitions:
        if config.streams.partitions != config.event_log.partitions:
            raise ConfigError(
                f"streams.partitions: {config.streams.partitions} and event_log.partitions: "
                f"{config.event_log.partitions} are the same number; give one of them."
            )


def _retention(config: Config) -> None:
    from ...schemas.topics import CATALOGUE

    kept_long = [name for name, topic in CATALOGUE.items() if topic.kept != "compact"]
    for topic in config.event_log.retention:
        if topic not in kept_long:
            raise ConfigError(
                f"event_log.retention.{topic}: no such topic; known are {', '.join(kept_long)}."
            )
    for topic in _TOPICS_TO_JOIN:
        kept = config.event_log.retention.get(topic)
        if kept is None:
            continue
        endless = [name for name, s in config.rewards.items() if s.deadline is None]
        if endless:
            raise ConfigError(
                f"event_log.retention.{topic}: {kept / 3.6e6:.4g} h found, but reward source "
                f"{endless[0]} has no deadline, so its groups may wait longer. Set "
                f"rewards.{endless[0]}.deadline."
            )
        longest = max((s.deadline or 0 for s in config.rewards.values()), default=0)
        needed = longest + config.streams.late_horizon
        if kept < needed:
            raise ConfigError(
                f"event_log.retention.{topic}: {kept / 3.6e6:.4g} h found; the longest reward "
                f"deadline plus streams.late_horizon is {needed / 3.6e6:.4g} h, and a shorter "
                "retention would delete what is still joined."
            )


def _schedule(config: Config) -> None:
    buffer, trainer, optimizer = config.buffer, config.trainer, config.algorithm.optimizer
    steps = {buffer.total_steps, trainer.total_steps} - {None}
    if len(steps) > 1:
        raise ConfigError(
            f"buffer.total_steps: {buffer.total_steps} and trainer.total_steps: "
            f"{trainer.total_steps} found; give one of them."
        )
    ratio = optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0
    if not steps and (ratio or optimizer.lr_scheduler_type == "cosine"):
        raise ConfigError(
            "algorithm.optimizer: a warm-up ratio and the cosine schedule need to know the end. "
            "Set buffer.total_steps, or lr_warmup_steps and lr_scheduler_type: constant."
        )


def _engine(config: Config) -> None:
    if config.streams.engine == "faust" and not is_on_kafka(config):
        raise ConfigError(
            "streams.engine: faust reads Kafka only. Set event_log: kafka://host:9092, or "
            "streams.engine: native."
        )
