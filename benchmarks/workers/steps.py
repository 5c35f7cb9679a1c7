"""Training steps in a process of their own: ours, TRL's, or the bare model's.

    python steps.py WHO KIND MODEL BATCH THREADS ROWS

For each line on stdin one step is done and one line of JSON printed; the end of stdin ends it, with
the peak of its memory. WHO is ours, trl or bare. KIND is grpo (a mean over tokens), entropy (a mean
over sequences, with an entropy term in the loss) or dpo. ROWS: how many sequences, or pairs, TRL
puts into a micro-batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from workers.batch import GROUP_SIZE, Batch, digest

LEARNING_RATE = 1e-6
ENTROPY_COEF = 0.01
# TRL divides by the deviation of a group + 1e-4, we and Trinity + 1e-6
TRL_STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Work:
    """What a process was asked for."""

    kind: str
    model: str
    batch: Batch
    num_threads: int
    rows: int

    @property
    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """(prompt, response), as they are trained."""
        return self.batch.sequences("dpo" if self.kind == "dpo" else "grpo")


class Turns:
    """Lines from stdin to results on stdout; between `begin` and `end` lies a step."""

    def begin(self) -> bool:
        """Wait for the next turn; whether there is one."""
        if not sys.stdin.readline():
            return False
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return True

    def end(self, **found: Any) -> None:
        """Tell what the step took, and what it found."""
        seconds = time.perf_counter() - self._wall
        self.say(seconds=seconds, cpu_s=time.process_time() - self._cpu, **found)

    def say(self, **found: Any) -> None:
        """One line of JSON."""
        print(json.dumps(found), flush=True)


def ours(work: Work, turns: Turns) -> None:
    """`Learner.step`, as the trainer calls it."""
    from streamrft.consumers.learning.learner import Learner

    examples = list(our_examples(work))
    learner = Learner(our_settings(work), total_steps=None)
    trained = [
        (s.tokens[s.loss_mask == 0].tolist(), s.tokens[s.loss_mask == 1].tolist())
        for e in examples
        for s in e.sequences
    ]
    turns.say(digest=digest(trained), start_mb=memory_mb("VmRSS"))
    step = 0
    while turns.begin():
        step += 1
        metrics = learner.step(examples, step=step)
        turns.end(grad_norm=metrics["actor/grad_norm"])


def our_settings(work: Work) -> Any:
    """As TRL's: clip 0.2 without the dual clip, no KL but DPO's own, no weight decay."""
    from streamrft.consumers import settings as s

    fixed = s.OptimizerSettings(lr=LEARNING_RATE, weight_decay=0.0, lr_warmup_steps=0)
    if work.kind == "dpo":
        algorithm = s.AlgorithmSettings(
            "dpo",
            policy_loss_fn=s.FunctionSettings("dpo", {"beta": 0.1}),
            kl_loss_fn=s.FunctionSettings("none"),
            optimizer=fixed,
        )
    else:
        coef = ENTROPY_COEF if work.kind == "entropy" else 0.0
        algorithm = s.AlgorithmSettings(
            "grpo",
            loss_agg_mode="seq-mean-token-mean" if coef else "token-mean",
            advantage_fn=s.FunctionSettings("grpo", {"epsilon": TRL_STD_EPSILON}),
            policy_loss_fn=s.FunctionSettings("ppo", {"clip_range": 0.2, "clip_ratio_c": 1e6}),
            kl_loss_fn=s.FunctionSettings("none"),
            entropy_loss_fn=s.FunctionSettings("default", {"entropy_coef": coef}),
            optimizer=fixed,
        )
    return s.TrainerSettings(work.model, "unused", algorithm, num_threads=work.num_threads)


def our_examples(work: Work) -> Iterator[Any]:
    """The batch as the trainer's sources give it."""
    import numpy as np

    from streamrft.consumers.learning.examples import TrainingExample, TrainingSequence

    def sequence(prompt: list[int], response: list[int], logprobs: list[float]) -> Any:
        return TrainingSequence(
            np.array(prompt + response, np.int32),
            np.repeat([0, 1], [len(prompt), len(response)]).astype(np.uint8),
            np.concatenate([np.zeros(len(prompt)), logprobs]).astype(np.float32),
        )

    if work.kind == "dpo":
        for n, (prompt, response) in enumerate(work.sequences):
            one = sequence(prompt, response, [0.0] * len(response))
            names = (f"p.{n // 2}:{n % 2}:a", f"p.{n // 2}", n % 2, n // 2)
            yield TrainingExample(*names, (one,), preference=-1 if n % 2 else 1)
        return
    for g, group in enumerate(work.batch.groups):
        for i, (response, logprobs) in enumerate(zip(group.responses, group.logprobs, strict=True)):
            yield TrainingExample(
                f"g.{g}:{i}:a", f"g.{g}", i, g,
                (sequence(group.prompt_ids, response, logprobs),),
                reward=group.rewards[i],
                group_rewards=tuple(group.rewards),
                group_slot_index=i,
            )  # fmt: skip


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
        make = _trl_dpo if work.kind == "dpo" else _trl_grpo
        trainer, trained = make(work, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Beat())
        if work.kind != "entropy":
            _leave_out_metrics(trainer.model)
        turns.say(digest=digest(trained), start_mb=memory_mb("VmRSS"))
        try:
            trainer.train()
        except EOFError:
            return


def _trl_options(work: Work, folder: str, num_rows: int) -> dict[str, Any]:
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
    import functools

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


def _trl_grpo(work: Work, folder: str) -> tuple[Any, list[tuple[list[int], list[int]]]]:
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
        model=_model(work),
        reward_funcs=lambda recorded, **_: recorded,
        args=GRPOConfig(
            **_trl_options(work, folder, len(groups) * GROUP_SIZE),
            num_generations=GROUP_SIZE,
            shuffle_dataset=False,
            loss_type="grpo" if has_entropy else "dapo",
            entropy_coef=ENTROPY_COEF if has_entropy else 0.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(groups)}),
        processing_class=_tokenizer(work),
        rollout_func=rollouts,
    )
    return trainer, work.sequences


def _trl_dpo(work: Work, folder: str) -> tuple[Any, list[tuple[list[int], list[int]]]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    names = ("prompt", "chosen", "rejected")
    pairs = {name: [getattr(p, name) for p in work.batch.pairs] for name in names}
    trainer = DPOTrainer(
        model=_model(work),
        ref_model=_model(work),
        args=DPOConfig(**_trl_options(work, folder, len(work.batch.pairs)), max_length=None),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=_tokenizer(work),
    )
    rows = trainer.train_dataset
    return trainer, [(r["prompt_ids"], r[k]) for r in rows for k in ("chosen_ids", "rejected_ids")]


def bare(work: Work, turns: Turns) -> None:
    """One forward and backward pass of each sequence alone: no padding, no optimiser.

    The reference of DPO passes forward only, as it does for everybody.
    """
    import torch

    torch.set_num_threads(work.num_threads)
    model = _model(work).train()
    reference = _model(work).requires_grad_(False) if work.kind == "dpo" else None
    turns.say(digest=digest(work.sequences), start_mb=memory_mb("VmRSS"))
    while turns.begin():
        for prompt, response in work.sequences:
            options = {"input_ids": torch.tensor([prompt + response]), "use_cache": False}
            targets = torch.tensor(response)
            options["logits_to_keep"] = len(response) + 1
            if reference is not None:
                with torch.no_grad():
                    torch.nn.functional.cross_entropy(reference(**options).logits[0, :-1], targets)
            logits = model(**options).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, targets).backward()
        model.zero_grad()
        turns.end()


def _model(work: Work) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def _tokenizer(work: Work) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work.model)


def memory_mb(name: str) -> float:
    """VmRSS or VmHWM of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(name))
    return int(found) * 1024 / 1e6


WHO: dict[str, Callable[[Work, Turns], None]] = {"ours": ours, "trl": trl, "bare": bare}


def main(who: str, kind: str, model: str, batch: str, num_threads: str, rows: str) -> None:
    """Steps until stdin ends."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    turns = Turns()
    WHO[who](Work(kind, model, Batch.load(Path(batch)), int(num_threads), int(rows)), turns)
    turns.say(peak_mb=memory_mb("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:])
