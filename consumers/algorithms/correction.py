"""What the policy before the step makes of tokens that another policy, or an engine, wrote.

Keys, defaults and meaning are veRL's `rollout_correction`. log r is the log-prob of the policy
before the step less the behaviour's, at the trained tokens of one sequence.

Source: truncated importance sampling, Yao et al., "Your efficient RL framework secretly brings
you off-policy RL training", 2025; Liu et al., "When speed kills stability", 2025; decoupled PPO,
arXiv:2110.00641, eq. 11: the weight of the proximal policy over the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schemas.errors import ConfigError
from ...streams.registry import unknown

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Bounds = tuple[float, float]
WHERE = "algorithm.rollout_correction"
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
REJECTIONS = tuple(
    f"{reduction}_{kind}"
    for reduction in _REDUCTIONS
    for kind in _DIVERGENCES
    if (reduction, kind) != ("seq_max", "k1")
)


@dataclass(frozen=True)
class Corrected:
    """One array a sequence: `weights` of its tokens' policy loss, `kept` those that are trained."""

    weights: list[Floats]
    kept: list[Mask]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights and masks for a batch.

    Args:
        rollout_is: `token` weighs a token by r, `sequence` all of a sequence by the product of
            its r; null by nothing.
        rollout_is_threshold: larger weights are cut to it; "low_high" makes those outside 0.
        rollout_is_batch_normalize: divide by the mean weight, of tokens or of sequences.
        rollout_rs: names of REJECTIONS, by commas. What is outside is not trained: tokens alone,
            or the whole sequence. k1 is r itself, k2 (log r)^2 / 2 and k3 r - 1 - log r.
        rollout_rs_threshold: one for all names, or one each by commas. Of k1 "low_high", or high
            alone with 1 / high for low; of the others the highest value.
        bypass_mode: the old policy is the behaviour, not the policy before the step.
        loss_type: with bypass_mode, ppo_clip is the configured loss, whose ratio corrects
            already; reinforce is -A logp under the weights.
    """

    rollout_is: str | None = "sequence"
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    @classmethod
    def create(cls, args: Mapping[str, Any]) -> RolloutCorrection:
        """From the keys of the file.

        Raises:
            ConfigError: an unknown key, or a value that is refused.
        """
        known = [f.name for f in fields(cls)]
        for key in args:
            if key not in known:
                raise ConfigError(unknown(WHERE, key, known))
        return cls(**args)

    def __post_init__(self) -> None:
        _check_choice("rollout_is", self.rollout_is, (None, "token", "sequence"))
        _check_choice("loss_type", self.loss_type, ("ppo_clip", "reinforce"))
        for name in self._rejections:
            _check_choice("rollout_rs", name, REJECTIONS)
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise ConfigError(
                f"{WHERE}.rollout_is: {self.rollout_is!r} does nothing while old log-probs are the "
                "engine's: the ratio of the loss is already the policy's over the behaviour's. Set "
                "algorithm.bypass_old_logprobs: false, loss_type: reinforce or rollout_is: null."
            )
        if not self.bypass_mode and self.loss_type == "reinforce":
            raise ConfigError(f"{WHERE}.loss_type: reinforce needs bypass_mode: true.")
        _ = self._is_bounds, self._rs_bounds

    @property
    def is_reinforce(self) -> bool:
        """Whether the policy loss is replaced by -A logp."""
        return self.loss_type == "reinforce"

    def __call__(self, log_ratios: Sequence[Floats]) -> Corrected:
        """Of all sequences of a batch, log r [n] each."""
        weights = [self._weights(r) for r in log_ratios]
        truncated = [self._truncated(w) for w in weights]
        if self.rollout_is_batch_normalize and any(len(w) for w in weights):
            truncated = self._normalised(truncated)
        kept = [self._kept(r) for r in log_ratios]
        return Corrected(truncated, kept, self._metrics(weights, truncated, kept))

    @property
    def _rejections(self) -> tuple[str, ...]:
        names = (self.rollout_rs or "").split(",")
        return tuple(dict.fromkeys(n.strip() for n in names if n.strip()))

    @property
    def _is_bounds(self) -> Bounds | None:
        """Bounds outside which a weight is 0; None where it is only cut above."""
        if isinstance(self.rollout_is_threshold, str) and "_" in self.rollout_is_threshold:
            return _bounds("rollout_is_threshold", self.rollout_is_threshold)
        _number("rollout_is_threshold", self.rollout_is_threshold)
        return None

    @property
    def _rs_bounds(self) -> tuple[Bounds, ...]:
        names = self._rejections
        if not names:
            return ()
        if self.rollout_rs_threshold is None:
            raise ConfigError(f"{WHERE}.rollout_rs_threshold: null; {self.rollout_rs} needs it.")
        parts = [p.strip() for p in str(self.rollout_rs_threshold).split(",")]
        parts = parts * len(names) if len(parts) == 1 else parts
        if len(parts) != len(names):
            raise ConfigError(
                f"{WHERE}.rollout_rs_threshold: {len(parts)} thresholds for {len(names)} names; "
                "give one for all, or one each."
            )
        return tuple(_rejection_bounds(n, p) for n, p in zip(names, parts, strict=True))

    def _weights(self, log_ratio: Floats) -> Floats:
        if self.rollout_is is None:
            return np.ones_like(log_ratio)
        if self.rollout_is == "sequence":
            log_ratio = np.full_like(log_ratio, log_ratio.sum())
        return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))

    def _truncated(self, weights: Floats) -> Floats:
        if self.rollout_is is None:
            return weights
        bounds = self._is_bounds
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
        for name, (low, high) in zip(self._rejections, self._rs_bounds, strict=True):
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
            limit = self._is_bounds or (0.0, float(self.rollout_is_threshold))
            metrics["rollout_corr/rollout_is_mean"] = float(after.mean())
            metrics["rollout_corr/rollout_is_max"] = float(before.max())
            outside = (before < limit[0]) | (before > limit[1])
            metrics["rollout_corr/rollout_is_truncated_fraction"] = float(outside.mean())
        if self._rejections:
            metrics["rollout_corr/rollout_rs_masked_fraction"] = float(
                1 - np.concatenate(kept).mean()
            )
            rejected = [not k.all() for k in kept if len(k)]
            metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(np.mean(rejected))
        return metrics


def _rejection_bounds(name: str, threshold: str) -> Bounds:
    if not name.endswith("_k1"):
        return -np.inf, _number("rollout_rs_threshold", threshold)
    if "_" in threshold:
        return _bounds("rollout_rs_threshold", threshold)
    high = _number("rollout_rs_threshold", threshold)
    return 1 / high, high


def _bounds(key: str, threshold: str) -> Bounds:
    low, high = (_number(key, part) for part in threshold.split("_", 1))
    if low > high:
        raise ConfigError(f"{WHERE}.{key}: {threshold!r} found; low_high is allowed, low first.")
    return low, high


def _number(key: str, value: float | str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise ConfigError(
            f"{WHERE}.{key}: {value!r} found; a number above 0, or low_high, is allowed."
        ) from error
    if not number > 0:
        raise ConfigError(f"{WHERE}.{key}: {value!r} found; it must be above 0.")
    return number


def _check_choice(key: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        names = ", ".join("null" if a is None else a for a in allowed)
        raise ConfigError(f"{WHERE}.{key}: {value!r} found; allowed are {names}.")
