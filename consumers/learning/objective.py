"""What one step minimises: tokens, advantages and weights of a batch, then a micro-batch's loss.

N trained tokens of S sequences in the batch, n of them in a micro-batch. Weights are settled
over the whole batch before the first micro-batch, so several ranks may share the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..algorithms.advantages import Advantage
from ..algorithms.build import Algorithm
from ..algorithms.tokens import Tokens
from .batches import FlatBatch, Indices, flatten
from .examples import TrainingExample, TrainingSequence

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Objective:
    """One step's batch, ready to be cut.

    Args:
        flat: the sequences that have trained tokens.
        advantages: float32 [N].
        weights: float32 [N], of each token's loss in the total.
        active: int64, sequences whose loss is not 0 whatever the weights; others need no pass.
    """

    flat: FlatBatch
    advantages: Floats
    weights: Floats
    active: Indices


def prepare(
    examples: Sequence[TrainingExample], algorithm: Algorithm, *, max_tokens: int | None = None
) -> Objective:
    """Advantages and weights of the batch; examples that the advantage leaves out are gone.

    `max_tokens` is the constant of seq-mean-token-sum-norm; None takes the batch's longest.
    """
    values: list[Advantage] = [0.0] * len(examples)
    if algorithm.advantage is not None:
        values = algorithm.advantage(examples)
    kept = [(e, v) for e, v in zip(examples, values, strict=True) if v is not None]
    flat = flatten([s for e, _ in kept for s in e.sequences if _is_trained(s)])
    advantages = _spread([e for e, _ in kept], [v for _, v in kept])
    num_trained = flat.num_trained
    horizon = max_tokens or int(num_trained.max(initial=1))
    weights = np.repeat(algorithm.token_weights(num_trained, horizon=horizon), num_trained)
    active = np.arange(len(num_trained))
    if algorithm.can_skip_zero_advantage and len(active):
        active = np.flatnonzero(np.logical_or.reduceat(advantages != 0, flat.trained_starts[:-1]))
    return Objective(flat, advantages, weights.astype(np.float32), active)


def micro_loss(
    algorithm: Algorithm,
    tokens: Tokens,
    weights: Tensor,
    *,
    entropies: Tensor | None,
    ref_logprobs: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the loss, and its parts of the metrics.

    Metrics under loss/ are sums already weighted, under mean/ sums over tokens, under max/
    maxima: the caller adds them up, and divides mean/ by the number of tokens.
    """
    policy = algorithm.policy_loss(tokens)
    parts = {"pg_loss": (policy.losses, 1.0)}
    if ref_logprobs is not None:
        kl = algorithm.kl(tokens.logprobs, ref_logprobs, tokens.old_logprobs)
        parts["kl_loss"] = (kl, algorithm.kl.kl_coef)
    if entropies is not None:
        parts["entropy_loss"] = (entropies, -algorithm.entropy.entropy_coef)
    sums = {name: (weights * values).sum() for name, (values, _) in parts.items()}
    total = torch.stack([sums[n] * coef for n, (_, coef) in parts.items()]).sum()
    metrics = {f"loss/{n}": s.detach() for n, s in sums.items()} | {"loss/loss": total.detach()}
    metrics |= {f"mean/{n}": v.detach().sum() for n, v in policy.metrics.items()}
    if algorithm.advantage is not None:
        gap = (tokens.logprobs.detach() - tokens.old_logprobs).abs()
        metrics |= {"mean/logprob_gap_mean": gap.sum(), "max/logprob_gap_max": gap.max()}
    return total, metrics


class Totals:
    """Metrics of micro-batches, added up."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._num_tokens = 0

    def add(self, metrics: Mapping[str, Tensor], num_tokens: int) -> None:
        """One micro-batch's metrics, as `micro_loss` returns them."""
        self._num_tokens += num_tokens
        for name, value in metrics.items():
            value = value.double()
            known = self._values.get(name)
            if known is not None:
                value = torch.maximum(known, value) if name.startswith("max/") else known + value
            self._values[name] = value

    def metrics(self) -> dict[str, float]:
        """By their names in TrainStep, actor/*."""
        result: dict[str, float] = {}
        for key, value in self._values.items():
            kind, _, name = key.partition("/")
            scale = self._num_tokens if kind == "mean" else 1
            result[f"actor/{name}"] = float(value) / scale
        return result


def batch_metrics(examples: Sequence[TrainingExample]) -> dict[str, float]:
    """Rewards by source, response length and number of groups; rewards only where there are any."""
    lengths = [e.num_trained_tokens for e in examples]
    metrics = {"response_length/mean": float(np.mean(lengths))} if examples else {}
    scored = [e for e in examples if e.group_rewards]
    if not scored:
        return metrics
    rewards = np.array([e.reward for e in scored])
    metrics["reward/mean"], metrics["reward/std"] = float(rewards.mean()), float(rewards.std())
    for source in sorted({s for e in scored for s in e.reward_parts}):
        parts = [e.reward_parts[source] for e in scored if source in e.reward_parts]
        metrics[f"reward/{source}/mean"] = float(np.mean(parts))
    metrics["num_groups"] = float(len({e.group_id for e in examples}))
    return metrics


def _is_trained(sequence: TrainingSequence) -> bool:
    return bool(sequence.loss_mask[1:].any())


def _spread(examples: Sequence[TrainingExample], values: Sequence[Advantage]) -> Floats:
    """One value a trained token [N], from one an example or one array an example."""
    parts = [
        np.broadcast_to(np.asarray(value, np.float32), (example.num_trained_tokens,))
        for example, value in zip(examples, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
