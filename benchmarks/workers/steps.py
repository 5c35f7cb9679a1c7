"""Training steps in a process of their own: ours, TRL's, or the bare model's.

    python steps.py WHO KIND MODEL BATCH THREADS ROWS

For each line on stdin one step is done and one line of JSON printed; the end of stdin ends it, with
the peak of its memory. WHO is ours, trl or bare. KIND is grpo (a mean over tokens), entropy (a mean
over sequences, with an entropy term in the loss) or dpo. ROWS: how many sequences, or pairs, TRL
puts into a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from workers.batch import Batch, digest, our_group, our_sequence
from workers.trl_steps import trl
from workers.turns import ENTROPY_COEF, LEARNING_RATE, Turns, Work, model_of, peak_mb

# TRL divides by the deviation of a group + 1e-4, we and Trinity + 1e-6
TRL_STD_EPSILON = 1e-4


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
    turns.say(digest=digest(trained))
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
    from streamrft.consumers.learning.examples import TrainingExample

    if work.kind == "dpo":
        for n, (prompt, response) in enumerate(work.sequences):
            one = our_sequence(prompt, response, [0.0] * len(response))
            names = (f"p.{n // 2}:{n % 2}:a", f"p.{n // 2}", n % 2, n // 2)
            yield TrainingExample(*names, (one,), preference=-1 if n % 2 else 1)
        return
    for number, group in enumerate(work.batch.groups):
        yield from our_group(number, group)


def bare(work: Work, turns: Turns) -> None:
    """One forward and backward pass of each sequence alone: no padding, no optimiser.

    The reference of DPO passes forward only, as it does for everybody.
    """
    import torch

    torch.set_num_threads(work.num_threads)
    model = model_of(work).train()
    reference = model_of(work).requires_grad_(False) if work.kind == "dpo" else None
    turns.say(digest=digest(work.sequences))
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


WHO: dict[str, Callable[[Work, Turns], None]] = {"ours": ours, "trl": trl, "bare": bare}


def main(who: str, kind: str, model: str, batch: str, num_threads: str, rows: str) -> None:
    """Steps until stdin ends."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    turns = Turns()
    WHO[who](Work(kind, model, Batch.load(Path(batch)), int(num_threads), int(rows)), turns)
    turns.say(peak_mb=peak_mb())


if __name__ == "__main__":
    main(*sys.argv[1:])
