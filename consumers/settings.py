"""What the trainer is told; deploy/config fills it from the YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. `lr_warmup_steps` -1 takes lr_warmup_steps_ratio of total_steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True)
class FunctionSettings:
    """A registered function and its arguments."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgorithmSettings:
    """An algorithm and what of it is replaced; None takes the algorithm's default.

    Args:
        kl_penalty_fn: lowers each token's reward by its KL to the reference.
        bypass_old_logprobs: the old policy of a ratio is the behaviour of the record; false
            takes the policy before the step.
        rollout_correction: arguments of algorithms/correction.py; None corrects nothing.
    """

    algorithm_type: str = "grpo"
    advantage_fn: FunctionSettings | None = None
    policy_loss_fn: FunctionSettings | None = None
    kl_loss_fn: FunctionSettings | None = None
    entropy_loss_fn: FunctionSettings | None = None
    kl_penalty_fn: FunctionSettings | None = None
    loss_agg_mode: str | None = None
    bypass_old_logprobs: bool = True
    rollout_correction: Mapping[str, Any] | None = None
    optimizer: OptimizerSettings = OptimizerSettings()


@dataclass(frozen=True)
class SftSource:
    """Rows of a file to imitate, read in a seeded order. `path` as in a taskset.

    `whole_text` trains every token, as continued pre-training does, not the responses alone;
    `is_pairs` makes two sequences of a row, of what was chosen and what was rejected; `label_key`
    is the column that says whether a row's answer is wanted, None where all are imitated.
    """

    path: str
    split: str = "train"
    subset_name: str | None = None
    prompt_type: Literal["messages", "plaintext"] = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    tools_key: str = "tools"
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    total_epochs: int = 1
    shuffle: bool = True
    whole_text: bool = False
    is_pairs: bool = False
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str | None = None


@dataclass(frozen=True)
class LoraSettings:
    """The adapter that is trained in place of the weights; model.lora_configs[0].

    Args:
        rank, alpha: the update of a weight is (alpha / rank) B A. None: 32, or the start's.
        target_modules: all-linear, names of modules, or one regular expression.
        exclude_modules: names of modules that are left out, or one regular expression.
        base_model_name: what adapter_config.json calls the model below it.
    """

    rank: int | None = None
    alpha: float | None = None
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    base_model_name: str = ""


@dataclass(frozen=True)
class TrainerSettings:
    """One trainer: `batch_groups` groups a step online, `train_batch_size` rows a step for SFT.

    `experts` are rows of which every step online has `expert_rows` beside its groups.
    `async_save` writes the states of a full checkpoint while training goes on.
    `save_hf_checkpoint`: whose Hugging Face weights stay where shards hold the same (copies.py).
    `critic_model_path` None begins PPO's critic as the policy; only the critic learns in the
    first `critic_warmup` steps. `lora` trains an adapter alone; `start_adapter`, a folder of peft,
    is where it begins, or without `lora` is merged into the model first.
    """

    model_path: str
    checkpoint_uri: str
    algorithm: AlgorithmSettings
    batch_groups: int = 1
    train_batch_size: int = 0
    sft: SftSource | None = None
    experts: SftSource | None = None
    expert_rows: int = 0
    total_steps: int | None = None
    max_staleness: int | None = None
    source_max_staleness: Mapping[str, int | None] = field(default_factory=dict)
    sync_interval: int = 1
    save_interval: int = 0
    resume_minutes: float = 10.0
    async_save: bool = False
    save_hf_checkpoint: Literal["always", "last", "never"] = "always"
    max_checkpoints_to_keep: int = 0
    resume_from: str | None = None
    branch: str | None = None
    seed: int = 42
    deterministic: bool = False
    dtype: str = "float32"
    max_tokens_per_microbatch: int = 8192
    max_sequence_tokens: int | None = None
    gradient_checkpointing: bool = False
    num_threads: int | None = None
    max_read_timeout_ms: int = 1_800_000
    lease_ms: int = 10_000
    chat_template: str | None = None
    critic_model_path: str | None = None
    critic_warmup: int = 0
    lora: LoraSettings | None = None
    start_adapter: str | None = None
