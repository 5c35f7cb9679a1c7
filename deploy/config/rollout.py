"""What scheduler, explorers and join are told, out of one stage's configuration."""

from __future__ import annotations

from typing import Any

from ...producers.settings import (
    ExplorerSettings,
    RewardSourceSettings,
    RolloutArgs,
    SchedulerSettings,
    TasksetSettings,
)
from ...streams.settings import OperatorSettings, StreamSettings
from .buffer import Taskset
from .checks import is_on_kafka, pacing, tasksets
from .lengths import lengths_of
from .schema import Config, StageConfig
from .support import engine_of
from .training import branch_of, chat_template, groups_a_step, total_steps


def scheduler_settings(stage: StageConfig) -> SchedulerSettings:
    """What is published and how far ahead."""
    config = stage.config
    return SchedulerSettings(
        tasksets=_tasksets(config),
        batch_size=groups_a_step(config),
        group_size=config.algorithm.repeat_times,
        pacing=pacing(config),
        total_epochs=config.buffer.total_epochs,
        total_steps=total_steps(config),
        reward_wait_ms=None if config.deterministic else config.synchronizer.reward_wait,
        max_open_groups=config.synchronizer.max_open_groups,
        branch=branch_of(config),
    )


def explorer_settings(stage: StageConfig, storage_uri: str) -> ExplorerSettings:
    """How tasks are rolled out."""
    config, engine = stage.config, engine_of(stage)
    explorer, rollout, lengths = config.explorer, config.explorer.rollout_model, lengths_of(config)
    dtype = rollout.dtype if stage.gives("explorer.rollout_model.dtype") else engine.dtype
    thinking = rollout.enable_thinking
    return ExplorerSettings(
        tasksets=_tasksets(config),
        engine_type=engine.name,
        dtype=dtype,
        max_prompt_tokens=lengths.prompt,
        max_response_tokens=lengths.response,
        min_response_tokens=_first(rollout.min_response_tokens, config.model.min_response_tokens),
        enable_prompt_truncation=_first(
            rollout.enable_prompt_truncation, config.model.enable_prompt_truncation
        ),
        chat_template=rollout.chat_template or chat_template(config),
        enable_thinking=config.model.enable_thinking if thinking is None else thinking,
        runner_per_model=explorer.runner_per_model,
        max_timeout_ms=round(explorer.max_timeout * 1000),
        max_retry_times=explorer.max_retry_times,
        seed=rollout.seed if stage.gives("explorer.rollout_model.seed") else config.seed,
        deterministic=config.deterministic,
        reward_sources={
            name: RewardSourceSettings(source.weight, source.deadline)
            for name, source in config.rewards.items()
        },
        part_weights={name: source.weight for name, source in config.rewards.items()},
        weights_timeout_ms=round(config.synchronizer.sync_timeout * 1000),
        num_threads=explorer.num_threads,
        storage_uri=storage_uri,
        max_event_bytes=config.event_log.max_event_bytes,
    )


def stream_settings(stage: StageConfig) -> StreamSettings:
    """Join, filters and priority; Trinity's operators come before the filters of `streams`."""
    streams = stage.config.streams
    pipeline = stage.config.data_processor.experience_pipeline
    operators = (*pipeline.operators, *streams.filters)
    return StreamSettings(
        engine=streams.engine or ("faust" if is_on_kafka(stage.config) else "native"),
        on_deadline=streams.on_deadline,
        default_reward=streams.default_reward,
        min_group_size=streams.min_group_size,
        grace_ms=streams.grace_ms,
        late=streams.late,
        late_horizon_ms=streams.late_horizon,
        time=streams.time,
        max_skew_ms=streams.max_skew_ms,
        skip_lost=streams.skip_lost,
        filters=tuple(OperatorSettings(o.name, o.args) for o in operators),
        priority=(
            OperatorSettings(streams.priority.name, streams.priority.args)
            if streams.priority
            else None
        ),
        max_event_bytes=stage.config.event_log.max_event_bytes,
    )


def _tasksets(config: Config) -> tuple[TasksetSettings, ...]:
    return tuple(_taskset(config, taskset) for taskset in tasksets(config))


def _taskset(config: Config, taskset: Taskset) -> TasksetSettings:
    entry, form, selector = config.buffer.explorer_input, taskset.format, taskset.data_selector
    kind = selector.selector_type
    assert taskset.path is not None and form.prompt_type != "chatpair"
    return TasksetSettings(
        name=taskset.name,
        path=taskset.path,
        split=taskset.split,
        subset_name=taskset.subset_name,
        prompt_type=form.prompt_type,
        prompt_key=form.prompt_key,
        response_key=form.response_key,
        messages_key=form.messages_key,
        system_prompt=form.system_prompt,
        system_prompt_key=form.system_prompt_key,
        reply_prefix=form.reply_prefix,
        workflow_key=form.workflow_key,
        reward_fn_key=form.reward_fn_key,
        workflow=taskset.default_workflow_type
        or entry.default_workflow_type
        or TasksetSettings.workflow,
        reward_fn=taskset.default_reward_fn_type or entry.default_reward_fn_type or "",
        workflow_args=taskset.workflow_args,
        reward_fn_args=taskset.reward_fn_args,
        rollout_args=_rollout_args(config, taskset),
        selector="shuffle" if kind == "shuffle" else "random" if kind == "random" else "sequential",
        selector_seed=selector.seed,
    )


def _rollout_args(config: Config, taskset: Taskset) -> RolloutArgs:
    own, engine, model = taskset.rollout_args, config.explorer.rollout_model, config.model
    return RolloutArgs(
        temperature=_first(own.temperature, engine.temperature, model.temperature),
        top_p=_first(own.top_p, engine.top_p, model.top_p),
        top_k=_first(own.top_k, engine.top_k, model.top_k),
        max_tokens=own.max_tokens,
    )


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)
