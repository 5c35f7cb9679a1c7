"""What one step minimises: tokens, advantages and weights of a batch, then a micro-batch's loss.

N trained tokens of S sequences in the batch, n of them in a micro-batch. Weights are settled
over the whole batch before the first micro-batch, so several ranks may share the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..algorithms.advantages import Advantage
from ..algorithms.build import Algorithm
from ..algorithms.tokens import Tokens
from .batches import FlatBatch, Indices, flatten, plan
from .examples import TrainingExample
from .preparation import refilled

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Objective:
    """One step's batch, ready to be cut.

    Args:
        flat: the sequences that have trained tokens.
        advantages: float32 [N].
        weights: float32 [N], of each token's policy loss in the total.
        shared_weights: float32 [N], of its KL and entropy, where an expert's tokens and the
            policy's own have a mean each in the policy loss; None: the same.
        active: int64, sequences whose loss is not 0 whatever the weights; others need no pass.
        is_expert: bool [S], an expert wrote it.
        preferences: int64 [S], 1 wanted, -1 unwanted, None where nothing is preferred.
        is_paired: a wanted sequence is followed by its unwanted partner.
        num_trained_examples: examples that have an advantage other than 0, where there is one.
        num_trained_tokens: their trained tokens.
        kl_baseline: KTO's z.
    """

    flat: FlatBatch
    advantages: Floats
    weights: Floats
    active: Indices
    is_expert: npt.NDArray[np.bool_]
    preferences: Indices | None
    is_paired: bool
    num_trained_examples: int
    num_trained_tokens: int
    shared_weights: Floats | None = None
    kl_baseline: float = 0.0

    def cuts(
        self, budget: int, plan: Callable[[Indices, int], list[Indices]] = plan
    ) -> list[Indices]:
        """The micro-batches: indices of sequences in `flat`. Partners of a pair stay together.

        `plan` cuts lengths by a budget; it may leave a part to other ranks.
        """
        lengths = self.flat.lengths
        if not self.is_paired:
            return [self.active[rows] for rows in plan(lengths[self.active], budget)]
        pairs = plan(lengths.reshape(-1, 2).sum(axis=1), budget)
        return [(2 * rows[:, None] + np.arange(2)).ravel() for rows in pairs]


def prepare(
    examples: Sequence[TrainingExample], algorithm: Algorithm, *, max_tokens: int | None = None
) -> Objective:
    """Advantages and weights of the batch; examples that the advantage leaves out are gone.

    `max_tokens` is the constant of seq-mean-token-sum-norm; None takes the batch's longest.
    """
    values: list[Advantage] = [0.0] * len(examples)
    own = [i for i, e in enumerate(examples) if not e.is_expert]  # experts have no reward
    if algorithm.advantage is not None:
        for i, value in zip(own, algorithm.advantage([examples[i] for i in own]), strict=True):
            values[i] = value
    kept = [(e, v) for e, v in zip(examples, values, strict=True) if v is not None]
    if getattr(algorithm.advantage, "duplicate_experiences", False):
        kept = refilled(kept, len({examples[i].group_id for i in own}))
    chosen = [(e, s) for e, _ in kept for s in e.sequences if s.is_trained.any()]
    flat = flatten([s for _, s in chosen], recomputed=algorithm.recomputes_old)
    advantages = _spread([e for e, _ in kept], [v for _, v in kept])
    is_expert = np.array([e.is_expert for e, _ in chosen], bool)
    is_paired = getattr(algorithm.policy_loss, "is_paired", False)
    num_trained = flat.num_trained
    weights, shared = _weights(algorithm, num_trained, is_expert, max_tokens)
    active = np.arange(len(num_trained))
    if algorithm.can_skip_zero_advantage and len(active):
        active = np.flatnonzero(np.logical_or.reduceat(advantages != 0, flat.trained_starts[:-1]))
    counted = [e for e, v in kept if algorithm.advantage is None or np.any(np.asarray(v) != 0)]
    lengths = [e.num_trained_tokens for e in counted]
    return Objective(
        flat=flat,
        advantages=advantages,
        weights=weights,
        shared_weights=shared,
        active=active,
        is_expert=is_expert,
        preferences=_preferences([e for e, _ in chosen], is_paired=is_paired),
        is_paired=is_paired,
        num_trained_examples=sum(n > 0 for n in lengths),
        num_trained_tokens=sum(lengths),
    )


@dataclass(frozen=True)
class MicroTerms:
    """What a micro-batch's loss is made of beside its tokens; [N] each.

    Args:
        weights: of each token's policy loss in the total; `shared_weights` of its KL and entropy,
            None for the same.
        behaviour_logprobs: as recorded.
        correction: what a token's policy loss is multiplied by; None for 1.
        entropies: of the policy, where the loss has them.
        kl_coef: coefficient of the KL to the reference in this step.
    """

    weights: Tensor
    behaviour_logprobs: Tensor
    correction: Tensor | None = None
    shared_weights: Tensor | None = None
    entropies: Tensor | None = None
    kl_coef: float = 0.0


def micro_loss(
    algorithm: Algorithm, tokens: Tokens, terms: MicroTerms
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of the loss, and its parts of the metrics.

    Metrics under loss/ are sums already weighted, under mean/ sums over the policy's own tokens,
    under max/ maxima: the caller adds them up, and divides mean/ by the number of those tokens.
    """
    policy = algorithm.policy_loss(tokens)
    losses = policy.losses if terms.correction is None else policy.losses * terms.correction
    weights = shared = terms.weights
    if terms.shared_weights is not None:
        shared = terms.shared_weights
    sums, coefs = {"pg_loss": (weights * losses).sum()}, {"pg_loss": 1.0}
    if algorithm.kl.is_active:
        assert tokens.ref_logprobs is not None
        kl = algorithm.kl(tokens.logprobs, tokens.ref_logprobs, tokens.old_logprobs)
        sums["kl_loss"], coefs["kl_loss"] = (shared * kl).sum(), terms.kl_coef
    if terms.entropies is not None:
        is_own = algorithm.entropy.skips_experts
        entropies = tokens.own(weights * terms.entropies) if is_own else shared * terms.entropies
        sums["entropy_loss"] = entropies.sum()
        coefs["entropy_loss"] = -algorithm.entropy.entropy_coef
    total = torch.stack([sums[name] * coefs[name] for name in sums]).sum()
    metrics = {f"loss/{n}": s.detach() for n, s in sums.items()} | {"loss/loss": total.detach()}
    for name, values in policy.metrics.items():
        if name.startswith("seq/"):
            metrics[f"loss/{name[4:]}"] = (terms.weights * values.detach()).sum()
        else:
            metrics[f"mean/{name}"] = tokens.own(values.detach()).sum()
    gap = tokens.own(tokens.logprobs.detach() - terms.behaviour_logprobs)
    if algorithm.advantage is not None and len(gap):
        metrics |= _gap(gap)
    return total, metrics


def _gap(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the trainer's log-probs lie from the behaviour's, whoever is to blame.

    The KL of the behaviour to the trainer by k1, and by k3, which has less variance.
    """
    k3 = log_ratio.clamp(-20, 20).exp() - 1 - log_ratio
    return {
        "mean/logprob_gap_mean": log_ratio.abs().sum(),
        "max/logprob_gap_max": log_ratio.abs().max(),
        "mean/logprob_gap_kl": -log_ratio.sum(),
        "mean/logprob_gap_k3": k3.sum(),
    }


class Totals:
    """Metrics of micro-batches, added up."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._num_tokens = 0

    def add(self, metrics: Mapping[str, Tensor], num_tokens: int) -> None:
        """One micro-batch's metrics, as `micro_loss` gives them; `num_tokens` are its own."""
        self._num_tokens += num_tokens
        for name, value in metrics.items():
            value = value.double()
            known = self._values.get(name)
            if known is not None:
                value = torch.maximum(known, value) if name.startswith("max/") else known + value
            self._values[name] = value

    def plain(self) -> tuple[int, dict[str, float]]:
        """The number of tokens and the values, to be sent to other ranks."""
        return self._num_tokens, {name: float(value) for name, value in self._values.items()}

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Mapping[str, float]]]) -> Totals:
        """The totals of several ranks, each as `plain` gives it."""
        totals = cls()
        for num_tokens, values in parts:
            exact = {n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()}
            totals.add(exact, num_tokens)
        return totals

    def metrics(self) -> dict[str, float]:
        """By their names in TrainStep, actor/*."""
        result: dict[str, float] = {}
        for key, value in self._values.items():
            kind, _, name = key.partition("/")
            # of an expert's tokens alone the sums are of nothing
            scale = max(1, self._num_tokens) if kind == "mean" else 1
            result[f"actor/{name}"] = float(value) / scale
        return result


def batch_metrics(examples: Sequence[TrainingExample]) -> dict[str, float]:
    """Rewards by source, response length and number of groups; rewards only where there are any.

    An expert's rows are counted, and otherwise left out where there is anything else.
    """
    num_rows = sum(e.is_expert for e in examples)
    metrics = {"num_expert_rows": float(num_rows)} if num_rows else dict[str, float]()
    examples = [e for e in examples if not e.is_expert] or examples
    lengths = [e.num_trained_tokens for e in examples]
    if examples:
        metrics["response_length/mean"] = float(np.mean(lengths))
        cut = [any(s.is_truncated for s in e.sequences) for e in examples]
        metrics["response_length/clip_ratio"] = float(np.mean(cut))
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


def length_bias(examples: Sequence[TrainingExample], objective: Objective) -> dict[str, float]:
    """Mean trained tokens of what moves the weights, and its ratio to all that was produced."""
    examples = [e for e in examples if not e.is_expert]
    produced = float(np.mean([e.num_trained_tokens for e in examples])) if examples else 0.0
    if not objective.num_trained_examples or not produced:
        return {}
    trained = objective.num_trained_tokens / objective.num_trained_examples
    return {
        "response_length/trained_mean": trained,
        "response_length/trained_ratio": trained / produced,
    }


def _weights(
    algorithm: Algorithm,
    num_trained: Indices,
    is_expert: npt.NDArray[np.bool_],
    max_tokens: int | None,
) -> tuple[Floats, Floats | None]:
    """Weights [N] of the policy loss, and of the rest where an expert's have a mean of their own.

    `num_trained` and `is_expert` are [S].
    """
    horizon = max_tokens or int(num_trained.max(initial=1))
    shared = algorithm.token_weights(num_trained, horizon=horizon)
    spread = np.repeat(shared, num_trained).astype(np.float32)
    if not getattr(algorithm.policy_loss, "splits_experts", False):
        return spread, None
    apart = np.zeros(len(num_trained))
    for chosen in (is_expert, ~is_expert):
        apart[chosen] = algorithm.token_weights(num_trained[chosen], horizon=horizon)
    return np.repeat(apart, num_trained).astype(np.float32), spread


def _preferences(examples: Sequence[TrainingExample], *, is_paired: bool) -> Indices | None:
    """[S], of the example that each sequence is of."""
    found = np.array([e.preference for e in examples], np.int64)
    if is_paired:
        halves = found.reshape(-1, 2)
        assert (halves == (1, -1)).all(), "pairs stand side by side, the wanted one first"
    return found if found.any() else None


def _spread(examples: Sequence[TrainingExample], values: Sequence[Advantage]) -> Floats:
    """One value a trained token [N], from one an example or one array an example."""
    parts = [
        np.broadcast_to(np.asarray(value, np.float32), (example.num_trained_tokens,))
        for example, value in zip(examples, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
