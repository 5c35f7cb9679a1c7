"""The whole configuration as frozen dataclasses: Trinity's names and defaults, plus our sections.

Ours: `event_log`, `storage`, `rewards`, `streams`, `deterministic`, `seed`, `resume_from`, `branch`
and a few keys inside Trinity's sections. `config_support` names what of Trinity is not honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...streams.settings import StreamSettings
from .buffer import BufferSection
from .read import DurationMs
from .roles import ExplorerSection, SynchronizerSection, TrainerSection


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its schedule; `lr_warmup_steps` -1 takes the ratio of total_steps."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    optimizer_type: Literal["adam"] = "adam"
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True)
class AlgorithmSection:
    """The algorithm; `repeat_times` is the group size. A null function is the algorithm's own."""

    algorithm_type: str = "ppo"
    repeat_times: int = 1
    optimizer: OptimizerSection = OptimizerSection()
    sample_strategy: str | None = None
    sample_strategy_args: Mapping[str, Any] | None = None
    advantage_fn: str | None = None
    advantage_fn_args: Mapping[str, Any] | None = None
    kl_penalty_fn: str | None = None
    kl_penalty_fn_args: Mapping[str, Any] | None = None
    policy_loss_fn: str | None = None
    policy_loss_fn_args: Mapping[str, Any] | None = None
    kl_loss_fn: str | None = None
    kl_loss_fn_args: Mapping[str, Any] | None = None
    entropy_loss_fn: str | None = None
    entropy_loss_fn_args: Mapping[str, Any] | None = None
    loss_agg_mode: str | None = None
    enable_router_replay: bool = False
    bypass_old_logprobs: bool = True
    rollout_correction: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Operator:
    """One filter, by name or dotted path, with its arguments."""

    name: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExperiencePipeline:
    """`operators` become `streams.filters`."""

    operators: tuple[Operator, ...] = ()
    save_input: bool = True
    input_save_path: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None


@dataclass(frozen=True)
class DataProcessorSection:
    """Trinity's pipelines before and after rollout."""

    task_pipeline: Mapping[str, Any] | None = None
    experience_pipeline: ExperiencePipeline = ExperiencePipeline()


@dataclass(frozen=True)
class LoraSection:
    """One LoRA adapter; `path` is a folder of peft to go on from. `name` is for people.

    `target_modules` and `exclude_modules`: a text as peft takes it, or a list of names.
    """

    name: str | None = None
    path: str | None = None
    base_model_name: str | None = None
    lora_rank: int = 32
    lora_alpha: int = 32
    lora_dtype: str = "auto"
    target_modules: Any = "all-linear"
    exclude_modules: Any = None


@dataclass(frozen=True)
class ModelSection:
    """The policy: a model folder or name, its lengths in tokens and its sampling."""

    model_path: str = ""
    trust_remote_code: bool = False
    critic_model_path: str = ""
    custom_chat_template: str | None = None
    chat_template_path: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logprobs: int = 0
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    min_response_tokens: int = 0
    enable_prompt_truncation: bool = True
    repetition_penalty: float = 1.0
    enable_thinking: bool | None = None
    lora_configs: tuple[LoraSection, ...] = ()
    fully_sharded_loras: bool = False
    max_cpu_loras: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    tinker: Mapping[str, Any] = field(default_factory=dict)
    external_model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterSection:
    """Trinity's Ray cluster."""

    ray_address: str = "auto"
    node_num: int = 0
    gpu_per_node: int = 0


@dataclass(frozen=True)
class MonitorSection:
    """Trinity's monitors."""

    monitor_type: str = "tensorboard"
    monitor_args: Mapping[str, Any] | None = None
    detailed_stats: bool = False
    enable_ray_timeline: bool = False


@dataclass(frozen=True)
class LoggingSection:
    """What the processes write to their log files."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    group_by_node: bool = False


@dataclass(frozen=True)
class EventLogSection:
    """Where the events lie. `url` empty: sqlite in the job folder. `retention` by topic name.

    `options` go to the log's adapter: for kafka:// properties of librdkafka and `replication`.
    """

    url: str = ""
    max_event_bytes: int = StreamSettings.max_event_bytes
    partitions: int | None = None
    retention: Mapping[str, DurationMs | None] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StorageSection:
    """Object storage for checkpoints and large payloads. Empty: the job folder."""

    uri: str = ""


@dataclass(frozen=True)
class RewardSection:
    """One reward source. `deadline` null waits for ever; `max_staleness` null trains late."""

    weight: float = 1.0
    deadline: DurationMs | None = None
    max_staleness: int | None = None


@dataclass(frozen=True)
class StreamsSection:
    """Join, filters and priority; DESIGN 6. `workers` is the number of join processes.

    `engine` null takes faust on Kafka and native on the embedded log.
    """

    engine: Literal["native", "faust"] | None = None
    workers: int = 1
    partitions: int | None = None
    time: Literal["wall", "event"] = "wall"
    on_deadline: Literal["partial", "default", "drop"] = "partial"
    default_reward: float = 0.0
    min_group_size: int = 1
    grace_ms: int = 1_000
    late: Literal["ignore", "amend"] = "ignore"
    late_horizon: DurationMs = 3_600_000
    max_skew_ms: int = StreamSettings.max_skew_ms
    skip_lost: bool = False
    filters: tuple[Operator, ...] = ()
    priority: Operator | None = None


@dataclass(frozen=True)
class Config:
    """One run, or one stage of it after the merge."""

    mode: Literal["both", "explore", "train", "bench", "serve", "colocate"] = "both"
    project: str = "Trinity-RFT"
    group: str = ""
    name: str = "rft"
    checkpoint_root_dir: str = ""
    continue_from_checkpoint: bool = True
    ignore_validator_suggestions: bool = False
    ray_namespace: str = ""
    resume_from: str | None = None
    branch: str | None = None
    deterministic: bool = False
    seed: int = 42
    algorithm: AlgorithmSection = AlgorithmSection()
    data_processor: DataProcessorSection = DataProcessorSection()
    model: ModelSection = ModelSection()
    cluster: ClusterSection = ClusterSection()
    buffer: BufferSection = BufferSection()
    explorer: ExplorerSection = ExplorerSection()
    trainer: TrainerSection = TrainerSection()
    monitor: MonitorSection = MonitorSection()
    synchronizer: SynchronizerSection = SynchronizerSection()
    service: Mapping[str, Any] | None = None
    log: LoggingSection = LoggingSection()
    event_log: EventLogSection = EventLogSection()
    storage: StorageSection = StorageSection()
    rewards: Mapping[str, RewardSection] = field(default_factory=dict)
    streams: StreamsSection = StreamsSection()


@dataclass(frozen=True)
class StageConfig:
    """One stage's whole configuration; `name` is empty for a run without stages."""

    name: str
    config: Config
    given: frozenset[str]

    def gives(self, path: str) -> bool:
        """Whether the file says this key, so that it is no default."""
        return path in self.given
