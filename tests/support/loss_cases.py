"""Random tokens for formulas, and one batch small enough to work by hand.

N trained tokens, S sequences, T tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from streamrft.consumers.algorithms.build import Algorithm, build_algorithm
from streamrft.consumers.algorithms.tokens import Tokens
from streamrft.consumers.learning.examples import TrainingExample, TrainingSequence
from streamrft.consumers.learning.objective import MicroTerms, micro_loss, prepare
from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings

N = 64
LN2 = float(np.log(2))

# three siblings: rewards 3, 0, 0, so the mean is 1 and dr_grpo gives 2, -1, -1. Probabilities
# then and now; the token with mask 0 between two trained ones must not count.
MASKS = ([0, 1, 1], [0, 1], [0, 0, 1, 0, 1])
THEN = ([0.5, 0.5, 0.5], [0.5, 0.5], [0.5, 0.5, 0.5, 0.9, 0.5])
NOW = ([0.1, 1.0, 0.25], [0.1, 0.75], [0.1, 0.1, 0.5, 0.01, 0.125])
REWARDS = (3.0, 0.0, 0.0)
CENTRED = FunctionSettings("dr_grpo")
NO_KL = FunctionSettings("none")


def algorithm(name: str = "grpo", **functions: Any) -> Algorithm:
    return build_algorithm(AlgorithmSettings(algorithm_type=name, **functions))


def centred(loss: str, name: str = "grpo", *, mode: str | None = None, **args: Any) -> Algorithm:
    """A policy loss alone under rewards less their mean: no KL."""
    return algorithm(
        name,
        advantage_fn=CENTRED,
        policy_loss_fn=FunctionSettings(loss, args),
        kl_loss_fn=NO_KL,
        loss_agg_mode=mode,
    )


def policy_loss(name: str, **args: Any) -> Any:
    return algorithm(policy_loss_fn=FunctionSettings(name, args)).policy_loss


def tokens(seed: int = 0, spread: float = 1.0, **changes: Any) -> Tokens:
    """N random tokens of 5 sequences in float64; `spread` is the std of the log-ratio."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=N)
    made = Tokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.tensor(logprobs + spread * rng.normal(size=N)),
        advantages=torch.tensor(rng.normal(size=N)),
        sequence=torch.tensor(np.sort(rng.integers(0, 5, size=N))),
        num_sequences=5,
    )
    return dataclasses.replace(made, **changes)


def arrays(t: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs now and then, and advantages, [N] each."""
    return t.logprobs.detach().numpy(), t.old_logprobs.numpy(), t.advantages.numpy()


def sequence_means(t: Tokens, values: np.ndarray) -> np.ndarray:
    """Mean of the sequence at each of its tokens, [N], one sequence after the other."""
    result = np.zeros(N)
    for s in range(t.num_sequences):
        chosen = t.sequence.numpy() == s
        result[chosen] = values[chosen].mean()
    return result


def gradient(loss: Any, t: Tokens) -> np.ndarray:
    """Gradient of the sum of the losses by the log-probs, [N]."""
    logprobs = t.logprobs.detach().clone().requires_grad_()
    loss(dataclasses.replace(t, logprobs=logprobs)).losses.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy()


def agrees_with_autograd(loss: Any, t: Tokens) -> bool:
    """torch.autograd.gradcheck in float64; the loss has no stop-gradient."""

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(dataclasses.replace(t, logprobs=logprobs)).losses.sum()

    return torch.autograd.gradcheck(total, (t.logprobs,), eps=1e-7)


def is_factor_of_logprobs(factor: np.ndarray, loss: Any, t: Tokens) -> bool:
    """Whether the losses are factor [N] times log-prob, and the factor carries no gradient."""
    losses = loss(t).losses.detach().numpy()
    return np.allclose(losses, factor * arrays(t)[0], rtol=1e-12, atol=0.0) and np.allclose(
        gradient(loss, t), factor, rtol=1e-9, atol=1e-12
    )


def differences(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """Central finite differences of a scalar function, [N]."""
    result = np.zeros_like(at)
    for i in range(len(at)):
        step = np.zeros_like(at)
        step[i] = 1e-6
        result[i] = (function(at + step) - function(at - step)) / 2e-6
    return result


def worked(
    masks: Sequence[Sequence[int]] = MASKS,
    then: Sequence[Sequence[float]] = THEN,
    rewards: tuple[float, ...] = REWARDS,
    **changes: Any,
) -> list[TrainingExample]:
    """The batch above: one group, one sequence a member."""
    return [
        TrainingExample(
            trajectory_id=f"g.0:{i}:a",
            group_id="g.0",
            slot=i,
            number=0,
            sequences=(
                TrainingSequence(
                    np.arange(len(mask), dtype=np.int32),
                    np.array(mask, np.uint8),
                    np.log(np.array(then[i], np.float32)),
                ),
            ),
            reward=rewards[i],
            group_rewards=rewards,
            group_slot_index=i,
            **changes,
        )
        for i, mask in enumerate(masks)
    ]


def whole_loss(
    chosen: Algorithm,
    examples: Sequence[TrainingExample],
    now: Sequence[Sequence[float]] = NOW,
    *,
    reference: Sequence[Sequence[float]] | None = None,
    max_tokens: int | None = None,
    step: int = 1,
) -> tuple[float, dict[str, float]]:
    """Loss and metrics of a batch in one micro-batch, from probabilities now, one list a sequence.

    What is at a place that is not trained must change nothing.
    """
    objective = prepare(examples, chosen, max_tokens=max_tokens)
    flat = objective.flat

    def at_trained(probabilities: Sequence[Sequence[float]]) -> torch.Tensor:
        joined = np.log(np.concatenate([np.asarray(p, np.float64) for p in probabilities]))
        return torch.tensor(joined[flat.trained])

    sequence = np.repeat(np.arange(len(flat.lengths)), flat.num_trained)
    preferences = objective.preferences
    batch = Tokens(
        logprobs=at_trained(now),
        old_logprobs=torch.tensor(flat.old_logprobs, dtype=torch.float64),
        advantages=torch.tensor(objective.advantages, dtype=torch.float64),
        sequence=torch.tensor(sequence),
        num_sequences=len(flat.lengths),
        ref_logprobs=None if reference is None else at_trained(reference),
        is_expert=torch.tensor(objective.is_expert[sequence]),
        preferences=None if preferences is None else torch.tensor(preferences),
        pairs=torch.arange(len(flat.lengths)) // 2 if objective.is_paired else None,
        step=step,
    )
    correction, shared = flat.correction, objective.shared_weights
    terms = MicroTerms(
        weights=torch.tensor(objective.weights, dtype=torch.float64),
        shared_weights=None if shared is None else torch.tensor(shared, dtype=torch.float64),
        behaviour_logprobs=torch.tensor(flat.behaviour_logprobs, dtype=torch.float64),
        correction=None if correction is None else torch.tensor(correction, dtype=torch.float64),
        kl_coef=chosen.kl.kl_coef,
    )
    loss, metrics = micro_loss(chosen, batch, terms)
    return float(loss), {name: float(value) for name, value in metrics.items()}
