"""What scheduler and explorers are told; deploy/config fills it from the YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RolloutArgs:
    """Sampling of one rollout. `max_tokens` None takes the model's limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None


@dataclass(frozen=True)
class TasksetSettings:
    """One taskset and how its rows are read."""

    name: str
    path: str
    split: str = "train"
    subset_name: str | None = None
    prompt_type: Literal["messages", "plaintext"] = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    reply_prefix: str | None = None
    workflow_key: str = ""
    reward_fn_key: str = ""
    workflow: str = "simple_workflow"
    reward_fn: str = ""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    rollout_args: RolloutArgs = RolloutArgs()
    selector: Literal["sequential", "shuffle", "random"] = "sequential"
    selector_seed: int = 42


@dataclass(frozen=True)
class Pacing:
    """How far task publishing may run ahead of training.

    The tasks of step c are published once policy_version c - 1 - allowed_staleness exists.
    """

    style: Literal["fixed", "fully_async"] = "fixed"
    sync_interval: int = 1
    sync_offset: int = 0
    max_staleness: int = 2

    @property
    def allowed_staleness(self) -> int:
        """S of DESIGN.md: fixed gives sync_interval - 1 + sync_offset."""
        if self.style == "fully_async":
            return self.max_staleness
        return self.sync_interval - 1 + self.sync_offset


@dataclass(frozen=True)
class SchedulerSettings:
    """What is published and how far ahead. `batch_size` counts groups a step.

    With `reward_wait_ms` None a group stays in the window however long its reward takes.
    """

    tasksets: tuple[TasksetSettings, ...]
    batch_size: int
    group_size: int
    pacing: Pacing
    total_epochs: int = 1
    total_steps: int | None = None
    reward_wait_ms: int | None = 60_000
    max_open_groups: int = 10_000
    branch: str = "main"
    lease_ms: int = 10_000


@dataclass(frozen=True)
class RewardSourceSettings:
    """One expected reward source beside those that the workflow itself scores."""

    weight: float = 1.0
    deadline_ms: int | None = None


@dataclass(frozen=True)
class ExplorerSettings:
    """How tasks are rolled out."""

    tasksets: tuple[TasksetSettings, ...]
    engine_type: str = "transformers"
    dtype: str = "float32"
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 1024
    min_response_tokens: int = 0
    enable_prompt_truncation: bool = True
    chat_template: str | None = None
    enable_thinking: bool | None = None
    runner_per_model: int = 8
    max_timeout_ms: int = 1_800_000
    max_retry_times: int = 2
    seed: int = 42
    deterministic: bool = False
    reward_sources: Mapping[str, RewardSourceSettings] = field(default_factory=dict)
    part_weights: Mapping[str, float] = field(default_factory=dict)
    weights_timeout_ms: int = 3_600_000
    num_threads: int | None = None
    storage_uri: str | None = None
    max_event_bytes: int = 8 * 2**20
