"""Which of Trinity's keys do nothing here, and why: each that a file gives becomes one warning.

A rule stands for a key or a whole section. `only` names the values that mean what is done anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ...consumers.algorithms.catalogue import has_critic
from ...schemas.errors import ConfigError
from .buffer import ReplayBuffer
from .checks import SELECTORS, rolls_out, tasksets, uses_sft
from .roles import DynamicTimeout, OverRollout
from .rows import expert_rows, mixes_experts
from .schema import StageConfig

_LATER = "is not in this version"
_NOT_YET = "not in this version"
_VLLM_ADAPTER = "streamrft.producers.engines.vllm_engine"


@dataclass(frozen=True)
class Rule:
    """`path` has no list indices; a section stands for all its keys. `only`: harmless values."""

    path: str
    why: str
    only: tuple[Any, ...] = ()


def _rules(paths: str, why: str, *only: Any) -> Iterator[Rule]:
    for path in paths.split():
        yield Rule(path, why, only)


_SERVING = f"serving {_LATER}"
_EVALUATION = f"evaluation {_LATER}; no evaluation will run"
_ENGINE = "belongs to the vLLM engine and changes nothing in the transformers engine"
_SHARDED = f"Megatron and sequence parallelism {_LATER}; trainer.num_ranks shards by FSDP2"
_ON_LOG = "every trajectory and experience is kept on the log, so nothing else is written"

RULES: tuple[Rule, ...] = (
    *_rules("cluster", "no Ray and no cluster here; start roles on other machines instead"),
    *_rules("ignore_validator_suggestions", "there is no GPU memory validator"),
    *_rules("monitor", f"monitors {_LATER}; metrics are on the log: `streamrft status`"),
    *_rules("service", f"Data-Juicer {_LATER}"),
    *_rules("log.group_by_node", "every process has its own file in the folder log/"),
    *_rules("algorithm.sample_strategy", _NOT_YET, None, "default", "staleness_control", "mix"),
    *_rules("algorithm.enable_router_replay", _NOT_YET, False),
    *_rules("data_processor.task_pipeline", f"the task pipeline {_LATER}", None),
    *_rules("data_processor.experience_pipeline.save_input", _ON_LOG, True),
    *_rules("data_processor.experience_pipeline.input_save_path", _ON_LOG, None),
    *_rules(
        "data_processor.experience_pipeline.inputs data_processor.experience_pipeline.output",
        _ON_LOG,
        None,
        {},
    ),
    *_rules("model.trust_remote_code", "code from model folders is never run", False),
    *_rules("model.logprobs", "log-probs are always recorded", 0),
    *_rules("model.repetition_penalty", _NOT_YET, 1.0),
    *_rules("model.fully_sharded_loras model.max_cpu_loras", _ENGINE, None, False),
    *_rules("model.rope_scaling model.rope_theta", f"{_NOT_YET}; config.json decides", None),
    *_rules("model.tinker", f"Tinker {_LATER}", {}),
    *_rules("model.external_model", f"an external model {_LATER}", {}),
    *_rules("buffer.explorer_input.eval_tasksets", _EVALUATION, ()),
    *_rules("buffer.explorer_input.default_eval_workflow_type", _EVALUATION, None),
    *_rules(
        "buffer.trainer_input.experience_buffer.replay_buffer",
        f"replay {_LATER}; the log keeps every experience",
        ReplayBuffer(),
    ),
    *_rules(
        "buffer.trainer_input.experience_buffer.max_retry_times "
        "buffer.trainer_input.experience_buffer.max_retry_interval",
        "rows are read from disk",
    ),
    *_rules("buffer.trainer_input.experience_buffer.schema_type", "algorithm_type decides", None),
    *_rules(
        "buffer.trainer_input.experience_buffer.data_selector.seed "
        "buffer.trainer_input.experience_buffer.data_selector.feature_keys "
        "buffer.trainer_input.experience_buffer.data_selector.kwargs",
        "the run's seed shuffles the rows",
        (),
        {},
    ),
    *_rules(
        "buffer.trainer_input.experience_buffer.capacity",
        "the log has no capacity; synchronizer.* bounds what is outstanding",
    ),
    *_rules("explorer.eval_interval explorer.eval_on_startup", _EVALUATION),
    *_rules("explorer.bench_on_latest_checkpoint", f"bench mode {_LATER}", False),
    *_rules(
        "explorer.runner_prepare_concurrency explorer.runner_prepare_max_retries "
        "explorer.runner_state_report_interval explorer.max_repeat_times_per_runner",
        "there are no runner processes; runner_per_model rollouts share one explorer",
        None,
        0,
    ),
    *_rules("explorer.concurrent_mode", "a group is generated in one batch"),
    *_rules("explorer.auxiliary_models", f"auxiliary models {_LATER}", ()),
    *_rules("explorer.over_rollout", _NOT_YET, OverRollout()),
    *_rules("explorer.dynamic_timeout", _NOT_YET, DynamicTimeout()),
    *_rules(
        "explorer.max_inflight_batches",
        "synchronizer.max_staleness bounds how far exploring runs ahead",
    ),
    *_rules(
        "explorer.proxy_port explorer.listen_address explorer.service_status_check_interval "
        "explorer.min_running_model_num explorer.db_url",
        _SERVING,
    ),
    *_rules("trainer.trainer_type trainer.trainer_strategy", "the trainer is streamrft's own"),
    *_rules("trainer.enable_preview", f"previews {_LATER}; see `streamrft tail trajectories`"),
    *_rules(
        "trainer.use_dynamic_bsz trainer.use_remove_padding trainer.balance_batch "
        "trainer.fix_actor_microbatch_loss_scale",
        "micro-batches are always packed by tokens",
        True,
    ),
    *_rules("trainer.ulysses_sequence_parallel_size trainer.megatron", _SHARDED, 1),
    *_rules(
        "trainer.param_offload trainer.optimizer_offload trainer.grad_offload "
        "trainer.offload_policy",
        f"offloading {_LATER}",
        False,
    ),
    *_rules("trainer.save_strategy", "one process saves", "unrestricted"),
    *_rules("trainer.trainer_config trainer.trainer_config_path", "there is no verl below", {}, ""),
    *_rules(
        "synchronizer.explorer_sync_interval synchronizer.trainer_sync_interval",
        f"{_NOT_YET}; sync_interval decides",
        None,
    ),
    *_rules(
        "synchronizer.group_name synchronizer.wait_for_checkpoint",
        "explorers follow the checkpoints topic",
    ),
)

_MODEL_RULES = (
    *_rules(
        "tensor_parallel_size data_parallel_size pipeline_parallel_size enable_expert_parallel "
        "extra_engine_args use_v1 enforce_eager enable_prefix_caching enable_chunked_prefill "
        "gpu_memory_utilization enable_log_requests weight_sync_buffer_size base_port",
        _ENGINE,
    ),
    *_rules("model_path", "the explorer runs the policy: model.model_path decides", None),
    *_rules("name logprobs", "log-probs are always recorded", None),
    *_rules("repetition_penalty", _NOT_YET, None, 1.0),
    *_rules("rope_scaling rope_theta", f"{_NOT_YET}; config.json decides", None),
    *_rules("ignore_eos enable_multimodal enable_auto_tool_choice", _NOT_YET, False),
    *_rules("tool_call_parser reasoning_parser", _NOT_YET, None),
    *_rules("enable_openai_api enable_history api_key", _SERVING, False, "EMPTY"),
)
_FORMAT_RULES = (
    *_rules("format.image_key format.video_key", _NOT_YET, None),
    *_rules("format.enable_concatenated_multi_turn", _NOT_YET, False),
    *_rules("format.chat_template format.enable_thinking", "model.* decides", None),
)
_TASKSET_RULES = (
    *_FORMAT_RULES,
    *_rules(
        "format.chosen_key format.rejected_key format.label_key",
        "preferences are trained on, not rolled out",
    ),
    *_rules("format.tools_key", _NOT_YET, None),
    *_rules("rollout_args.logprobs", "log-probs are always recorded", None, 0),
    *_rules("rollout_args.n", "algorithm.repeat_times is the group size", 1),
    *_rules("data_selector.feature_keys data_selector.kwargs", _NOT_YET, (), {}),
    *_rules("max_retry_times max_retry_interval enable_progress_bar", "rows are read from disk"),
    *_rules("repeat_times", "algorithm.repeat_times is the group size", 1),
)
_ROWS_RULES = (
    *_FORMAT_RULES,
    *_rules(
        "format.reply_prefix format.workflow_key format.reward_fn_key",
        "rows to imitate are not rolled out",
        None,
        "",
    ),
)


def warnings_of(stage: StageConfig) -> list[str]:
    """One sentence for each section or key that was given and does nothing."""
    config, given = stage.config, stage.given
    plain = {re.sub(r"\[\d+\]", "", path) for path in given}
    indexed = {re.sub(r"\[\d+\]", "", path): path for path in given}
    found: dict[str, list[str]] = {}
    for rule in (*RULES, *_expanded()):
        if rule.path not in plain or value_at(config, indexed[rule.path]) in rule.only:
            continue
        found.setdefault(rule.why, []).append(rule.path)
    texts = [f"{', '.join(paths)}: {why}." for why, paths in found.items()]
    return [*texts, *_meant_otherwise(stage), *_lost_when_late(stage)]


def _meant_otherwise(stage: StageConfig) -> Iterator[str]:
    """Keys that are honoured, but in another way than in Trinity."""
    config, sync = stage.config, stage.config.synchronizer
    source = config.buffer.trainer_input.experience_buffer
    if config.mode == "colocate":
        yield "mode: colocate is both; processes share the device as they are."
    if rolls_out(config) and engine_of(stage).warning:
        yield engine_of(stage).warning
    if sync.sync_method not in ("checkpoint", "offline") and stage.gives(
        "synchronizer.sync_method"
    ):
        yield (
            f"synchronizer.sync_method: {sync.sync_method} {_LATER}; weights travel through object "
            "storage (checkpoint)."
        )
    if sync.sync_style not in ("fixed", "fully_async"):
        yield (
            f"synchronizer.sync_style: {sync.sync_style} runs as fully_async, bounded by "
            "synchronizer.max_staleness."
        )
    yield from _meant_for_others(stage)
    tasks, group = config.buffer.batch_size, config.algorithm.repeat_times
    size = config.buffer.train_batch_size
    size -= expert_rows(config) if size else 0
    taken = 1 if config.algorithm.algorithm_type == "dpo" else group
    if rolls_out(config) and size and size != tasks * taken:
        what = "pairs" if taken < group else "experiences"
        yield (
            f"buffer.batch_size: {tasks} tasks give {tasks * taken} {what}, but "
            f"train_batch_size is {size}; {size // taken} groups are published and trained a step."
        )
    if source and source.path and not uses_sft(config):
        yield (
            f"buffer.trainer_input.experience_buffer.path: {source.path} is not written; "
            "experiences are on the log, topic experiences."
        )
    for taskset in tasksets(config):
        kind = taskset.data_selector.selector_type
        if kind not in SELECTORS:
            yield f"data_selector.selector_type of {taskset.name}: {kind} {_LATER}; sequential is."


def _lost_when_late(stage: StageConfig) -> Iterator[str]:
    """Reward sources that may score when the run has gone on without them."""
    config = stage.config
    wait = config.synchronizer.reward_wait
    late = [
        name
        for name, source in config.rewards.items()
        if source.deadline is not None
        and source.deadline > wait
        and not stage.gives(f"rewards.{name}.max_staleness")
    ]
    if late and rolls_out(config) and not config.deterministic:
        yield (
            f"rewards.{', '.join(late)}: a group that is not scored within "
            f"synchronizer.reward_wait, {wait / 1000:g} s, is trained only while the weights "
            f"allow it, else dropped as stale. rewards.{late[0]}.max_staleness: null trains it "
            "however late it is; a longer reward_wait lets the run wait."
        )


def _meant_for_others(stage: StageConfig) -> Iterator[str]:
    """Keys of one algorithm beside another."""
    algorithm = stage.config.algorithm
    place = "buffer.trainer_input.experience_buffer.format"
    pairs = [p for p in (f"{place}.chosen_key", f"{place}.rejected_key") if stage.gives(p)]
    if pairs and algorithm.algorithm_type != "dpo":
        yield f"{', '.join(pairs)}: only algorithm_type dpo reads pairs."
    if stage.gives(f"{place}.label_key") and algorithm.algorithm_type != "kto":
        yield f"{place}.label_key: only algorithm_type kto reads verdicts."
    if stage.config.buffer.trainer_input.auxiliary_buffers and not mixes_experts(stage.config):
        yield "buffer.trainer_input.auxiliary_buffers: only policy_loss_fn mix and mix_chord read."
    critic = [p for p in ("model.critic_model_path", "trainer.critic_warmup") if stage.gives(p)]
    if critic and not has_critic(algorithm.algorithm_type, algorithm.advantage_fn):
        yield f"{', '.join(critic)}: only advantage_fn ppo has a critic."


def value_at(config: Any, path: str) -> Any:
    """Value at a dotted path, list indices in brackets; None where a name is missing."""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(config, tuple):
            config = config[int(part)]
        elif isinstance(config, dict):
            config = config.get(part)
        else:
            config = getattr(config, part)
    return config


@dataclass(frozen=True)
class Engine:
    """The engine that runs, its dtype unless given, and why it is another than was asked."""

    name: str
    dtype: str
    warning: str = ""


def engine_of(stage: StageConfig) -> Engine:
    """The engine of a stage: the one asked for where it is here, else transformers.

    Raises:
        ConfigError: no engine of that name.
    """
    asked = stage.config.explorer.rollout_model.engine_type
    path = "explorer.rollout_model.engine_type"
    if asked == "transformers":
        return Engine(asked, "float32")
    if asked not in ("vllm", "sglang", "tinker", "external"):
        raise ConfigError(f"{path}: {asked!r} found; allowed are vllm and transformers.")
    if asked == "vllm" and find_spec("vllm") and find_spec(_VLLM_ADAPTER):
        return Engine(asked, "bfloat16")
    how = f"{asked} is asked for" if stage.gives(path) else f"{asked} is the default"
    why = (
        'is not installed (pip install "streamrft[vllm]")'
        if asked == "vllm" and find_spec(_VLLM_ADAPTER)
        else _LATER
    )
    text = (
        f"{path}: {how} but {why}; the transformers engine runs, in float32 unless dtype is given."
    )
    return Engine("transformers", "float32", text)


def _expanded() -> Iterator[Rule]:
    for rule in _MODEL_RULES:
        yield Rule(f"explorer.rollout_model.{rule.path}", rule.why, rule.only)
    for place, rules in (
        ("explorer_input.taskset", _TASKSET_RULES),
        ("explorer_input.tasksets", _TASKSET_RULES),
        ("trainer_input.experience_buffer", _ROWS_RULES),
    ):
        for rule in rules:
            yield Rule(f"buffer.{place}.{rule.path}", rule.why, rule.only)
