"""Which numbers a configuration may hold; each is refused here, before any process starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...schemas.errors import ConfigError
from .schema import Config

Range = tuple[str, float | None, float, float]
_NO_LIMIT = math.inf


def check_ranges(config: Config) -> None:
    """Raise ConfigError for the first number outside its range; null is always in it."""
    for key, value, least, most in (*_counts(config), *_training(config), *_sampling(config)):
        if value is None or least <= value <= most:
            continue
        allowed = f"at least {least:g}" if most == _NO_LIMIT else f"{least:g} to {most:g}"
        raise ConfigError(f"{key}: {value} found; {allowed} is allowed.")
    _above_zero(config)
    _betas(config)


def _counts(config: Config) -> Iterator[Range]:
    buffer, sync, streams = config.buffer, config.synchronizer, config.streams
    at_least: list[tuple[str, float | None, float]] = [
        ("seed", config.seed, 0),
        ("buffer.batch_size", buffer.batch_size, 1),
        ("buffer.train_batch_size", buffer.train_batch_size, 0),
        ("buffer.total_epochs", buffer.total_epochs, 1),
        ("buffer.total_steps", buffer.total_steps, 1),
        ("algorithm.repeat_times", config.algorithm.repeat_times, 1),
        ("explorer.runner_per_model", config.explorer.runner_per_model, 1),
        ("explorer.max_retry_times", config.explorer.max_retry_times, 0),
        ("explorer.num_threads", config.explorer.num_threads, 1),
        ("explorer.rollout_model.engine_num", config.explorer.rollout_model.engine_num, 1),
        ("explorer.rollout_model.seed", config.explorer.rollout_model.seed, 0),
        ("synchronizer.sync_interval", sync.sync_interval, 1),
        ("synchronizer.sync_offset", sync.sync_offset, 0),
        ("synchronizer.max_staleness", sync.max_staleness, 0),
        ("synchronizer.max_open_groups", sync.max_open_groups, 1),
        ("streams.workers", streams.workers, 1),
        ("streams.min_group_size", streams.min_group_size, 1),
        ("streams.grace_ms", streams.grace_ms, 0),
        ("streams.max_skew_ms", streams.max_skew_ms, 0),
        ("streams.partitions", streams.partitions, 1),
        ("event_log.partitions", config.event_log.partitions, 1),
        ("event_log.max_event_bytes", config.event_log.max_event_bytes, 1024),
        *((f"rewards.{n}.max_staleness", s.max_staleness, 0) for n, s in config.rewards.items()),
    ]
    return ((key, value, least, _NO_LIMIT) for key, value, least in at_least)


def _training(config: Config) -> Iterator[Range]:
    trainer, optimizer = config.trainer, config.algorithm.optimizer
    yield "trainer.total_steps", trainer.total_steps, 1, _NO_LIMIT
    yield "trainer.save_interval", trainer.save_interval, 0, _NO_LIMIT
    yield "trainer.max_checkpoints_to_keep", trainer.max_checkpoints_to_keep, 0, _NO_LIMIT
    yield "trainer.resume_minutes", trainer.resume_minutes, 0, _NO_LIMIT
    yield "trainer.num_ranks", trainer.num_ranks, 1, _NO_LIMIT
    yield "trainer.num_threads", trainer.num_threads, 1, _NO_LIMIT
    yield "trainer.max_token_len_per_gpu", trainer.max_token_len_per_gpu, 1, _NO_LIMIT
    yield "algorithm.optimizer.lr", optimizer.lr, 0, _NO_LIMIT
    yield "algorithm.optimizer.weight_decay", optimizer.weight_decay, 0, _NO_LIMIT
    yield "algorithm.optimizer.lr_warmup_steps", optimizer.lr_warmup_steps, -1, _NO_LIMIT
    yield "algorithm.optimizer.lr_warmup_steps_ratio", optimizer.lr_warmup_steps_ratio, 0, 1
    yield "algorithm.optimizer.min_lr_ratio", optimizer.min_lr_ratio, 0, 1


def _sampling(config: Config) -> Iterator[Range]:
    entry = config.buffer.explorer_input
    tasksets = {f"tasksets[{i}]": t for i, t in enumerate(entry.tasksets)}
    if entry.taskset is not None:
        tasksets["taskset"] = entry.taskset
    places = {
        "model": config.model,
        "explorer.rollout_model": config.explorer.rollout_model,
        **{f"buffer.explorer_input.{n}.rollout_args": t.rollout_args for n, t in tasksets.items()},
    }
    for where, section in places.items():
        yield f"{where}.temperature", section.temperature, 0, _NO_LIMIT
        yield f"{where}.top_p", section.top_p, 0, 1
        yield f"{where}.top_k", section.top_k, -1, _NO_LIMIT
    for name, taskset in tasksets.items():
        where = f"buffer.explorer_input.{name}"
        yield f"{where}.rollout_args.max_tokens", taskset.rollout_args.max_tokens, 1, _NO_LIMIT
        yield f"{where}.data_selector.seed", taskset.data_selector.seed, 0, _NO_LIMIT
    yield "model.min_response_tokens", config.model.min_response_tokens, 0, _NO_LIMIT


def _above_zero(config: Config) -> None:
    source = config.buffer.trainer_input.experience_buffer
    for key, value in (
        ("explorer.max_timeout", config.explorer.max_timeout),
        ("synchronizer.sync_timeout", config.synchronizer.sync_timeout),
        (
            "buffer.trainer_input.experience_buffer.max_read_timeout",
            source.max_read_timeout if source else 1,
        ),
    ):
        if value <= 0:
            raise ConfigError(f"{key}: {value} found; seconds above 0 are allowed.")


def _betas(config: Config) -> None:
    betas = config.algorithm.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"algorithm.optimizer.betas: {list(betas)} found; two numbers, each at least 0 and "
            "below 1, are allowed."
        )
