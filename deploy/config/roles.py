"""The `explorer:`, `trainer:` and `synchronizer:` sections, with Trinity's names and defaults.

A key that is only here so that an existing file loads is named in `config_support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .read import DurationMs


@dataclass(frozen=True)
class EngineModel:
    """One inference model. Unset sampling and lengths come from `model:`."""

    model_path: str | None = None
    name: str | None = None
    engine_type: str = "vllm"
    engine_num: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    extra_engine_args: Mapping[str, Any] = field(default_factory=dict)
    use_v1: bool = True
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    gpu_memory_utilization: float = 0.9
    dtype: str = "bfloat16"
    seed: int = 42
    ignore_eos: bool = False
    enable_multimodal: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None
    enable_history: bool = False
    enable_openai_api: bool = False
    enable_log_requests: bool = False
    base_port: int | None = None
    api_key: str = "EMPTY"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    weight_sync_buffer_size: int = 1024
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: int | None = None
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    min_response_tokens: int | None = None
    enable_prompt_truncation: bool | None = None
    repetition_penalty: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None


@dataclass(frozen=True)
class OverRollout:
    """Trinity's straggler control; `wait_after_min` in seconds."""

    ratio: float = 0.0
    wait_after_min: float = 30.0
    return_partial_tasks: bool = False


@dataclass(frozen=True)
class DynamicTimeout:
    """Trinity's time-out from the mean duration of rollouts."""

    enable: bool = False
    warmup_min_steps: int = 1
    ratio: float = 3.0


@dataclass(frozen=True)
class ExplorerSection:
    """How tasks are rolled out. `max_timeout` is seconds an attempt."""

    name: str = "explorer"
    runner_per_model: int = 8
    runner_prepare_concurrency: int = 8
    runner_prepare_max_retries: int = 2
    max_timeout: float = 1800
    max_retry_times: int = 2
    env_vars: Mapping[str, str] = field(default_factory=dict)
    concurrent_mode: Literal["sequential", "asynchronous", "multi-threading"] = "sequential"
    max_repeat_times_per_runner: int | None = None
    rollout_model: EngineModel = EngineModel()
    auxiliary_models: tuple[EngineModel, ...] = ()
    eval_interval: int = 100
    eval_on_startup: bool = True
    bench_on_latest_checkpoint: bool = False
    proxy_port: int = 8010
    listen_address: str = "0.0.0.0"
    service_status_check_interval: int = 60
    min_running_model_num: int = 1
    db_url: str | None = None
    over_rollout: OverRollout = OverRollout()
    dynamic_timeout: DynamicTimeout = DynamicTimeout()
    runner_state_report_interval: int = 0
    max_inflight_batches: int = 2
    num_threads: int | None = None


@dataclass(frozen=True)
class Megatron:
    """Trinity's Megatron parallelism."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = True


@dataclass(frozen=True)
class TrainerSection:
    """How is trained. Steps are optimiser steps; `save_interval` 0 saves fully only at the end.

    `resume_minutes` (minutes) bounds what a restart trains again, whatever `save_interval` says.
    `async_save` null writes full checkpoints while training goes on, but not in deterministic runs.
    `num_ranks` processes on this machine share the model and each batch.
    `max_token_len_per_gpu` null takes twice `model.max_model_len`, at least 8,192.
    """

    name: str = "trainer"
    trainer_type: Literal["verl", "tinker"] = "verl"
    trainer_strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    save_interval: int = 0
    enable_preview: bool = False
    total_steps: int | None = None
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    grad_clip: float = 1.0
    use_dynamic_bsz: bool = True
    use_remove_padding: bool = True
    balance_batch: bool = True
    critic_warmup: int = 0
    max_token_len_per_gpu: int | None = None
    ulysses_sequence_parallel_size: int = 1
    fix_actor_microbatch_loss_scale: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    grad_offload: bool = False
    offload_policy: bool = False
    save_strategy: str = "unrestricted"
    max_checkpoints_to_keep: int = 0
    megatron: Megatron = Megatron()
    trainer_config: Mapping[str, Any] = field(default_factory=dict)
    trainer_config_path: str = ""
    resume_minutes: float = 10.0
    async_save: bool | None = None
    num_ranks: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    num_threads: int | None = None


@dataclass(frozen=True)
class SynchronizerSection:
    """How far exploring may run ahead of training, in steps. `sync_timeout` is in seconds.

    `max_staleness`: steps; null takes what the style allows. `reward_wait`: how long a rolled out
    group holds its place in the window unrewarded. `max_open_groups`: parked and outstanding.
    """

    sync_method: Literal["nccl", "checkpoint", "memory", "online", "offline"] = "nccl"
    sync_style: Literal[
        "fixed",
        "fully_async",
        "explorer_driven",
        "trainer_driven",
        "dynamic_by_explorer",
        "dynamic_by_trainer",
    ] = "fixed"
    sync_interval: int = 1
    explorer_sync_interval: int | None = None
    trainer_sync_interval: int | None = None
    sync_offset: int = 0
    sync_timeout: float = 3600
    group_name: str = "rollout_weight_sync"
    wait_for_checkpoint: bool = False
    max_staleness: int | None = None
    reward_wait: DurationMs = 60_000
    max_open_groups: int = 10_000
