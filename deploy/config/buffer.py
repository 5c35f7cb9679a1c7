"""The `buffer:` section: tasksets, batches and the experience buffer, with Trinity's names.

A key that is only here so that an existing file loads is named in `config_support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Format:
    """Which columns of a row mean what. Read by the scheduler, the workflows and SFT."""

    prompt_type: Literal["messages", "plaintext", "chatpair"] = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    messages_key: str = "message"
    tools_key: str | None = None
    image_key: str | None = None
    video_key: str | None = None
    reply_prefix: str | None = None
    workflow_key: str = ""
    reward_fn_key: str = ""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    enable_concatenated_multi_turn: bool = False
    chat_template: str | None = None
    enable_thinking: bool | None = None


@dataclass(frozen=True)
class RolloutArgsSection:
    """Sampling of one taskset. Unset values come from `explorer.rollout_model`, then `model`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass(frozen=True)
class DataSelector:
    """Order of the rows."""

    selector_type: str = "sequential"
    seed: int = 42
    feature_keys: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taskset:
    """One source of tasks. `path` is a file, a folder or a data set name."""

    name: str = ""
    storage_type: Literal["file", "sql"] = "file"
    path: str | None = None
    split: str = "train"
    subset_name: str | None = None
    default_workflow_type: str | None = None
    default_reward_fn_type: str | None = None
    rollout_args: RolloutArgsSection = RolloutArgsSection()
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    data_selector: DataSelector = DataSelector()
    format: Format = Format()
    max_retry_times: int = 3
    max_retry_interval: int = 1
    enable_progress_bar: bool = False
    repeat_times: int = 1


@dataclass(frozen=True)
class ReplayBuffer:
    """Trinity's replay in memory; the log keeps everything anyway."""

    enable: bool = False
    priority_fn: str = "linear_decay"
    reuse_cooldown_time: float | None = None
    priority_fn_args: Mapping[str, Any] = field(default_factory=lambda: {"decay": 2.0})


@dataclass(frozen=True)
class ExperienceBuffer:
    """Where the trainer reads: the log (queue, sql) or a file of rows to imitate (file).

    `max_read_timeout` is in seconds.
    """

    name: str = ""
    storage_type: Literal["queue", "sql", "file"] = "queue"
    path: str | None = None
    capacity: int = 10000
    max_read_timeout: float = 1800
    replay_buffer: ReplayBuffer = ReplayBuffer()
    split: str = "train"
    subset_name: str | None = None
    format: Format = Format()
    schema_type: str | None = None
    data_selector: DataSelector = DataSelector()
    max_retry_times: int = 3
    max_retry_interval: int = 1


@dataclass(frozen=True)
class ExplorerInput:
    """What is rolled out: one `taskset` or several `tasksets`, mixed in proportion."""

    taskset: Taskset | None = None
    tasksets: tuple[Taskset, ...] = ()
    eval_tasksets: tuple[Taskset, ...] = ()
    default_workflow_type: str | None = None
    default_eval_workflow_type: str | None = None
    default_reward_fn_type: str | None = None


@dataclass(frozen=True)
class TrainerInput:
    """What is trained on."""

    experience_buffer: ExperienceBuffer | None = None
    auxiliary_buffers: Mapping[str, ExperienceBuffer] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferSection:
    """`batch_size`: tasks a step. `train_batch_size`: experiences; 0 is tasks x repeat_times."""

    batch_size: int = 1
    train_batch_size: int = 0
    total_epochs: int = 1
    total_steps: int | None = None
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
