"""GRPO without the tokens that would change the policy's entropy most.

With p = pi(y_t), H the entropy and S_t = p (H + log p): the first-order change of the entropy when
token t is made likelier is -S_t times the step, so S_t far below or above its mean is a token that
would move it. All of the policy that is trained, before the step.

Source: arXiv:2602.03392.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, Values, trained
from .group import GroupAdvantage

Mask = npt.NDArray[np.bool_]


@ADVANTAGES.register("clipb")
@dataclass(frozen=True)
class BatchEntropyClip:
    """Tokens of negative advantage with S - mean(S) < -mu std(S) get advantage 0.

    Statistics over the trained tokens of the batch, std biased. Trinity takes the tokens out of
    the mask, so of the average too; here they stay in the average.
    """

    epsilon: float = 1e-6
    mu: float = 2.5
    measures = frozenset({"current_logprobs", "entropies"})

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience."""
        advantages = _token_advantages(examples, self.epsilon)
        signals = [_signal(e) for e in examples]
        whole = np.concatenate(signals) if signals else np.zeros(0)
        std = float(whole.std()) if len(whole) else 0.0
        if std < 1e-12:
            return list(advantages)
        return [
            np.where((a < 0) & (s - whole.mean() < -self.mu * std), 0.0, a)
            for a, s in zip(advantages, signals, strict=True)
        ]


@ADVANTAGES.register("clipv")
@dataclass(frozen=True)
class VocabularyEntropyClip:
    """Tokens without positive advantage and with D > mu std(D) get advantage 0.

    D = E_(a~pi)[pi(a) (H + log pi(a))] - S. At most max_frac of the trained tokens (one at
    least) are taken, those of the largest D of negative advantage first.
    """

    epsilon: float = 1e-6
    mu: float = 8.5
    max_frac: float = 1e-4
    measures = frozenset({"current_logprobs", "entropies", "expected_signals"})

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience."""
        advantages = _token_advantages(examples, self.epsilon)
        if not advantages:
            return []
        distances = [trained(e, "expected_signals") - _signal(e) for e in examples]
        flat, distance = np.concatenate(advantages), np.concatenate(distances)
        if not len(flat) or distance.std() < 1e-12:
            return list(advantages)
        is_clipped = self._clipped(flat, distance)
        cuts = np.cumsum([len(a) for a in advantages])[:-1]
        return list(np.split(np.where(is_clipped, 0.0, flat), cuts))

    def _clipped(self, advantages: Values, distance: Values) -> Mask:
        is_clipped = (advantages < 0) & (distance > self.mu * distance.std())
        limit = max(int(self.max_frac * len(advantages)), 1)
        if is_clipped.sum() <= self.max_frac * len(advantages) or is_clipped.sum() <= limit:
            return is_clipped
        order = np.argsort(-np.where(is_clipped, distance, -np.inf), kind="stable")
        chosen = np.zeros_like(is_clipped)
        chosen[order[:limit]] = True
        return chosen


def _token_advantages(examples: Sequence[TrainingExample], epsilon: float) -> list[Values]:
    values = GroupAdvantage(epsilon)(examples)
    counts = [sum(int(s.is_trained.sum()) for s in e.sequences) for e in examples]
    return [np.full(n, v) for n, v in zip(counts, values, strict=True)]


def _signal(example: TrainingExample) -> Values:
    logprobs = trained(example, "current_logprobs")
    return np.exp(logprobs) * (trained(example, "entropies") + logprobs)
