"""TRL's trainers, held to the turns and the batch of the benchmark; all else is theirs."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from .batch import GROUP_SIZE, digest
from .turns import ENTROPY_COEF, LEARNING_RATE, Turns, Work, model_of, tokenizer_of

Sequences = list[tuple[list[int], list[int]]]


def trl(work: Work, turns: Turns) -> None:
    """TRL's own trainer and loop: its loss, its collation, its optimiser, generation left out."""
    import torch
    from transformers import PrinterCallback, TrainerCallback

    torch.set_num_threads(work.num_threads)

    class Beat(TrainerCallback):
        """Let the loop do a step when it is told to."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not turns.begin():
                raise EOFError

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            turns.end(grad_norm=logs["grad_norm"])

    with tempfile.TemporaryDirectory() as folder:
        make = _dpo if work.kind == "dpo" else _grpo
        trainer, trained = make(work, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Beat())
        if work.kind != "entropy":
            _leave_out_metrics(trainer.model)
        turns.say(digest=digest(trained))
        try:
            trainer.train()
        except EOFError:
            return


def _options(work: Work, folder: str, num_rows: int) -> dict[str, Any]:
    """What both trainers are told: float32, no checkpointing, AdamW as ours, one log a step."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": work.rows,
        "gradient_accumulation_steps": num_rows // work.rows,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "max_steps": 1_000,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
    }


def _leave_out_metrics(model: Any) -> None:
    """Spare TRL the entropies and mean logits that it only logs: we do not compute them either."""
    import torch
    from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs",))
    forward = model.forward

    @functools.wraps(forward)
    def lean(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if isinstance(found, FusedCausalLMOutput):
            found.entropy = found.mean_logits = torch.zeros_like(found.log_probs)
            found.is_top1 = torch.zeros_like(found.log_probs, dtype=torch.bool)
        return found

    model.forward = lean


def _grpo(work: Work, folder: str) -> tuple[Any, Sequences]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    groups = {g.prompt: g for g in work.batch.groups}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What was sampled, in the order of the prompts: GROUP_SIZE times each."""
        chosen = [(groups[p], i % GROUP_SIZE) for i, p in enumerate(prompts)]
        return {
            "prompt_ids": [g.prompt_ids for g, _ in chosen],
            "completion_ids": [g.responses[i] for g, i in chosen],
            "logprobs": [g.logprobs[i] for g, i in chosen],
            "recorded": [g.rewards[i] for g, i in chosen],
        }

    class Recorded(GRPOTrainer):
        """The policy of the ratio's denominator is the recorded one."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            found = super()._generate_and_score_completions(inputs)
            found["old_per_token_logps"] = found["sampling_per_token_logps"]
            return found

    has_entropy = work.kind == "entropy"
    trainer = Recorded(
        model=model_of(work),
        reward_funcs=lambda recorded, **_: recorded,
        args=GRPOConfig(
            **_options(work, folder, len(groups) * GROUP_SIZE),
            num_generations=GROUP_SIZE,
            shuffle_dataset=False,
            loss_type="grpo" if has_entropy else "dapo",
            entropy_coef=ENTROPY_COEF if has_entropy else 0.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(groups)}),
        processing_class=tokenizer_of(work),
        rollout_func=rollouts,
    )
    return trainer, work.sequences


def _dpo(work: Work, folder: str) -> tuple[Any, Sequences]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    names = ("prompt", "chosen", "rejected")
    pairs = {name: [getattr(p, name) for p in work.batch.pairs] for name in names}
    trainer = DPOTrainer(
        model=model_of(work),
        ref_model=model_of(work),
        args=DPOConfig(**_options(work, folder, len(work.batch.pairs)), max_length=None),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer_of(work),
    )
    rows = trainer.train_dataset
    return trainer, [(r["prompt_ids"], r[k]) for r in rows for k in ("chosen_ids", "rejected_ids")]
