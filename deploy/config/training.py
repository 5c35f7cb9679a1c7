"""What the trainer is told, out of one stage's configuration; and the numbers of its steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...consumers.algorithms.catalogue import AlgorithmType, algorithm_type, check_sources
from ...consumers.algorithms.correction_keys import CorrectionKeys
from ...consumers.settings import (
    AlgorithmSettings,
    FunctionSettings,
    OptimizerSettings,
    TrainerSettings,
)
from ...schemas.errors import ConfigError
from .adapters import adapter_settings
from .checks import pacing, uses_sft
from .lengths import Lengths, lengths_of
from .roles import TrainerSection
from .rows import expert_rows, expert_source, trained_rows
from .schema import AlgorithmSection, Config, StageConfig

FIRST_BRANCH = "main"


def trainer_settings(stage: StageConfig, checkpoint_uri: str) -> TrainerSettings:
    """How is trained."""
    config = stage.config
    trainer, sync, lengths = config.trainer, config.synchronizer, lengths_of(config)
    source = config.buffer.trainer_input.experience_buffer
    sft = uses_sft(config)
    return TrainerSettings(
        model_path=_model_path(config),
        checkpoint_uri=checkpoint_uri,
        algorithm=algorithm_settings(stage),
        batch_groups=1 if sft else groups_a_step(config),
        train_batch_size=config.buffer.train_batch_size if sft else 0,
        sft=trained_rows(config) if sft else None,
        experts=expert_source(config),
        expert_rows=expert_rows(config),
        total_steps=total_steps(config),
        max_staleness=None if sft else _max_staleness(config),
        source_max_staleness=_source_staleness(stage),
        sync_interval=sync.sync_interval,
        save_interval=trainer.save_interval,
        resume_minutes=trainer.resume_minutes,
        async_save=not config.deterministic if trainer.async_save is None else trainer.async_save,
        save_hf_checkpoint=trainer.save_hf_checkpoint if not stage.name else _for_next(trainer),
        max_checkpoints_to_keep=trainer.max_checkpoints_to_keep,
        resume_from=config.resume_from,
        branch=branch_of(config) if config.resume_from else None,
        seed=config.seed,
        deterministic=config.deterministic,
        dtype=trainer.dtype,
        max_tokens_per_microbatch=_microbatch_tokens(config, lengths),
        max_sequence_tokens=lengths.model,
        gradient_checkpointing=trainer.gradient_checkpointing,
        num_threads=trainer.num_threads,
        max_read_timeout_ms=round(1000 * (source.max_read_timeout if source else 1800)),
        chat_template=chat_template(config),
        critic_model_path=config.model.critic_model_path or None,
        critic_warmup=trainer.critic_warmup,
        **adapter_settings(stage),
    )


def _source_staleness(stage: StageConfig) -> dict[str, int | None]:
    return {
        name: source.max_staleness
        for name, source in stage.config.rewards.items()
        if stage.gives(f"rewards.{name}.max_staleness")
    }


def _for_next(trainer: TrainerSection) -> Literal["always", "last"]:
    """The next stage begins with the Hugging Face folder of the last step, as in Trinity."""
    return "always" if trainer.save_hf_checkpoint == "always" else "last"


def algorithm_settings(stage: StageConfig) -> AlgorithmSettings:
    """The algorithm, with the functions that the file replaces or gives arguments.

    Raises:
        ConfigError: an algorithm that is unknown, or that waits for a source of data, or a
            correction that cannot be meant.
    """
    section = stage.config.algorithm
    spec = algorithm_type(section.algorithm_type)
    check_sources(
        section.algorithm_type,
        advantage_fn=section.advantage_fn,
        policy_loss_fn=section.policy_loss_fn,
    )
    bypasses_old = _bypasses_old_logprobs(stage)
    _check_correction(section, spec, bypasses_old=bypasses_old)
    loss_args = dict(section.policy_loss_fn_args or {})
    agg_mode = loss_args.pop("loss_agg_mode", None)
    return AlgorithmSettings(
        algorithm_type=section.algorithm_type,
        advantage_fn=_function(
            spec, "advantage_fn", section.advantage_fn, section.advantage_fn_args
        ),
        policy_loss_fn=_function(spec, "policy_loss_fn", section.policy_loss_fn, loss_args),
        kl_loss_fn=_function(spec, "kl_loss_fn", section.kl_loss_fn, section.kl_loss_fn_args),
        entropy_loss_fn=_function(
            spec, "entropy_loss_fn", section.entropy_loss_fn, section.entropy_loss_fn_args
        ),
        kl_penalty_fn=_function(
            spec, "kl_penalty_fn", section.kl_penalty_fn, section.kl_penalty_fn_args
        ),
        loss_agg_mode=section.loss_agg_mode or agg_mode,
        bypass_old_logprobs=bypasses_old,
        rollout_correction=section.rollout_correction,
        optimizer=_optimizer(stage),
    )


def _check_correction(
    section: AlgorithmSection, spec: AlgorithmType, *, bypasses_old: bool
) -> None:
    if section.rollout_correction is None:
        return
    if spec.schema != "experience":
        raise ConfigError(
            f"algorithm.rollout_correction: found with algorithm_type {section.algorithm_type}, "
            "whose loss has no ratio to what a behaviour policy wrote. Remove it."
        )
    CorrectionKeys.create({"bypass_mode": bypasses_old, **section.rollout_correction})


def groups_a_step(config: Config) -> int:
    """Groups that one optimiser step trains on; of each, dpo takes one pair.

    Raises:
        ConfigError: train_batch_size is no multiple of the group size.
    """
    size, group = config.buffer.train_batch_size, config.algorithm.repeat_times
    if not size:
        return config.buffer.batch_size
    if config.algorithm.algorithm_type == "dpo":
        return size
    own = size - expert_rows(config)
    if own % group or not own:
        below, above = size - own % group, size - own % group + group
        listed = f"{below} or {above}" if below >= group else f"{above}"
        found = f"{size} found" if own == size else f"{size} found, {size - own} of an expert"
        raise ConfigError(
            f"buffer.train_batch_size: {found}, no multiple of algorithm.repeat_times "
            f"{group}. A step trains whole groups: write {listed}, or leave it out for "
            f"batch_size, {config.buffer.batch_size} groups."
        )
    return own // group


def total_steps(config: Config) -> int | None:
    """Optimiser steps after which the stage ends; None when the epochs decide."""
    return config.trainer.total_steps or config.buffer.total_steps


def branch_of(config: Config) -> str:
    """The branch that is trained: `main`, or the fork that `resume_from` asks for.

    Raises:
        ConfigError: resume_from names no checkpoint, or branch stands without it.
    """
    if not config.resume_from:
        if config.branch and config.branch != FIRST_BRANCH:
            raise ConfigError(
                f"branch: {config.branch!r} without resume_from; a branch begins at a checkpoint. "
                "Add resume_from: global_step_N."
            )
        return FIRST_BRANCH
    parts = config.resume_from.rstrip("/").split("/")
    prefix, _, step = parts[-1].rpartition("_")
    if prefix != "global_step" or not step.isdigit():
        raise ConfigError(
            f"resume_from: {config.resume_from!r} found; global_step_N or "
            "<branch>/global_step_N of this run's folder is allowed."
        )
    parent = parts[-2] if len(parts) == 2 else FIRST_BRANCH
    return config.branch or f"{parent}.{step}"


def _function(
    spec: AlgorithmType, key: str, name: str | None, args: Mapping[str, Any] | None
) -> FunctionSettings | None:
    """None leaves the algorithm's own; arguments alone are laid on its defaults."""
    own = getattr(spec, key)
    if not name and not args:
        return None
    if name and name != own:
        return FunctionSettings(name, dict(args or {}))
    if own is None:
        raise ConfigError(f"algorithm.{key}_args: the algorithm has no {key}; name one.")
    return FunctionSettings(own, {**getattr(spec, f"{key}_args", {}), **(args or {})})


def _optimizer(stage: StageConfig) -> OptimizerSettings:
    optimizer, trainer = stage.config.algorithm.optimizer, stage.config.trainer
    given_clip = stage.gives("trainer.grad_clip")
    return OptimizerSettings(
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        weight_decay=optimizer.weight_decay,
        lr_scheduler_type=optimizer.lr_scheduler_type,
        lr_warmup_steps=optimizer.lr_warmup_steps,
        lr_warmup_steps_ratio=optimizer.lr_warmup_steps_ratio,
        min_lr_ratio=optimizer.min_lr_ratio,
        clip_grad=trainer.grad_clip if given_clip else optimizer.clip_grad,
    )


def _bypasses_old_logprobs(stage: StageConfig) -> bool:
    """As the file says; true, Trinity's default, unless a correction asks for recomputed ones."""
    section = stage.config.algorithm
    if stage.gives("algorithm.bypass_old_logprobs") or section.rollout_correction is None:
        return section.bypass_old_logprobs
    return False


def _max_staleness(config: Config) -> int | None:
    args = config.algorithm.sample_strategy_args or {}
    if config.synchronizer.max_staleness is not None:
        return config.synchronizer.max_staleness
    if config.algorithm.sample_strategy == "staleness_control" and "max_staleness" in args:
        return int(args["max_staleness"])
    return pacing(config).allowed_staleness


def _microbatch_tokens(config: Config, lengths: Lengths) -> int:
    """Twice the model's length, but never so few that a short model pays for many passes."""
    given = config.trainer.max_token_len_per_gpu
    if given is not None:
        return given
    return max(2 * (lengths.model or 0), TrainerSettings.max_tokens_per_microbatch)


def _model_path(config: Config) -> str:
    """A folder becomes absolute, so that every process finds it; a hub name stays."""
    path = config.model.model_path
    return str(Path(path).resolve()) if os.path.isdir(path) else path


def chat_template(config: Config) -> str | None:
    """The template's text, from either key. Raises ConfigError when the file is not there."""
    path = config.model.chat_template_path
    if not path:
        return config.model.custom_chat_template
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"model.chat_template_path: {path} cannot be read: {error}") from error
