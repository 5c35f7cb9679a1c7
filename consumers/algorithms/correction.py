"""What the policy before the step makes of tokens that another policy, or an engine, wrote.

log r is the log-prob of the policy before the step less the behaviour's, at the trained tokens of
one sequence, float64 [n].

Source: truncated importance sampling, Yao et al., "Your efficient RL framework secretly brings
you off-policy RL training", 2025; Liu et al., "When speed kills stability", 2025; decoupled PPO,
arXiv:2110.00641: the weight of the proximal policy over the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .correction_keys import CorrectionKeys

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
# exp(20) is 5e8: beyond, a weight says no more than that the policies have nothing in common
MAX_LOG_RATIO = 20.0

_DIVERGENCES: dict[str, Callable[[Floats], Floats]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: np.exp(np.clip(log_ratio, -20, 20)) - 1 - log_ratio,
}
_REDUCTIONS: dict[str, Callable[[Floats], Floats]] = {
    "token": lambda values: values,
    "seq_sum": lambda values: np.full_like(values, values.sum()),
    "seq_mean": lambda values: np.full_like(values, values.mean()),
    "seq_max": lambda values: np.full_like(values, values.max()),
}


@dataclass(frozen=True)
class Corrected:
    """One array a sequence: `weights` of its tokens' policy loss, `kept` those that are trained."""

    weights: list[Floats]
    kept: list[Mask]
    metrics: Mapping[str, float]


class RolloutCorrection(CorrectionKeys):
    """Weights and masks for a batch, as the keys say. Pure."""

    def __call__(self, log_ratios: Sequence[Floats]) -> Corrected:
        """Of all sequences of a batch, log r [n] each."""
        weights = [self._weights(r) for r in log_ratios]
        truncated = [self._truncated(w) for w in weights]
        if self.rollout_is_batch_normalize and any(len(w) for w in weights):
            truncated = self._normalised(truncated)
        kept = [self._kept(r) for r in log_ratios]
        return Corrected(truncated, kept, self._metrics(weights, truncated, kept))

    def _weights(self, log_ratio: Floats) -> Floats:
        if self.rollout_is is None:
            return np.ones_like(log_ratio)
        if self.rollout_is == "sequence":
            log_ratio = np.full_like(log_ratio, log_ratio.sum())
        return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))

    def _truncated(self, weights: Floats) -> Floats:
        if self.rollout_is is None:
            return weights
        bounds = self.is_bounds
        if bounds is None:
            return np.minimum(weights, float(self.rollout_is_threshold))
        return np.where((weights >= bounds[0]) & (weights <= bounds[1]), weights, 0.0)

    def _normalised(self, weights: list[Floats]) -> list[Floats]:
        if self.rollout_is == "sequence":
            mean = float(np.mean([w[0] for w in weights if len(w)]))
        else:
            mean = float(np.concatenate(weights).mean())
        return [w / mean for w in weights] if mean > 0 else weights

    def _kept(self, log_ratio: Floats) -> Mask:
        kept = np.ones(len(log_ratio), bool)
        if not len(log_ratio):
            return kept
        for name, (low, high) in zip(self.rejections, self.rs_bounds, strict=True):
            reduction, kind = name.rsplit("_", 1)
            value = _REDUCTIONS[reduction](_DIVERGENCES[kind](log_ratio))
            value = np.exp(np.clip(value, -20, 20)) if kind == "k1" else value
            kept &= (value >= low) & (value <= high)
        return kept

    def _metrics(
        self, weights: list[Floats], truncated: list[Floats], kept: list[Mask]
    ) -> dict[str, float]:
        if not any(len(w) for w in weights):
            return {}
        metrics: dict[str, float] = {}
        if self.rollout_is is not None:
            before, after = np.concatenate(weights), np.concatenate(truncated)
            limit = self.is_bounds or (0.0, float(self.rollout_is_threshold))
            metrics["rollout_corr/rollout_is_mean"] = float(after.mean())
            metrics["rollout_corr/rollout_is_max"] = float(before.max())
            outside = (before < limit[0]) | (before > limit[1])
            metrics["rollout_corr/rollout_is_truncated_fraction"] = float(outside.mean())
        if self.rejections:
            metrics["rollout_corr/rollout_rs_masked_fraction"] = float(
                1 - np.concatenate(kept).mean()
            )
            rejected = [not k.all() for k in kept if len(k)]
            metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(np.mean(rejected))
        return metrics
