"""The keys of `rollout_correction`, veRL's, and what each may be. No NumPy: see catalogue.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from ...schemas.errors import ConfigError
from ...streams.registry import unknown

Bounds = tuple[float, float]
WHERE = "algorithm.rollout_correction"
REJECTIONS = tuple(
    f"{reduction}_{kind}"
    for reduction in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
    if (reduction, kind) != ("seq_max", "k1")
)


@dataclass(frozen=True)
class CorrectionKeys:
    """What the file may say under algorithm.rollout_correction.

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
    def create(cls, args: Mapping[str, Any]) -> Self:
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
        for name in self.rejections:
            _check_choice("rollout_rs", name, REJECTIONS)
        if self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None:
            raise ConfigError(
                f"{WHERE}.rollout_is: {self.rollout_is!r} does nothing while old log-probs are the "
                "engine's: the ratio of the loss is already the policy's over the behaviour's. Set "
                "algorithm.bypass_old_logprobs: false, loss_type: reinforce or rollout_is: null."
            )
        if not self.bypass_mode and self.loss_type == "reinforce":
            raise ConfigError(f"{WHERE}.loss_type: reinforce needs bypass_mode: true.")
        _ = self.is_bounds, self.rs_bounds

    @property
    def is_reinforce(self) -> bool:
        """Whether the policy loss is replaced by -A logp."""
        return self.loss_type == "reinforce"

    @property
    def rejections(self) -> tuple[str, ...]:
        """The names in rollout_rs, each once."""
        names = (self.rollout_rs or "").split(",")
        return tuple(dict.fromkeys(n.strip() for n in names if n.strip()))

    @property
    def is_bounds(self) -> Bounds | None:
        """Bounds outside which a weight is 0; None where it is only cut above."""
        if isinstance(self.rollout_is_threshold, str) and "_" in self.rollout_is_threshold:
            return _bounds("rollout_is_threshold", self.rollout_is_threshold)
        _number("rollout_is_threshold", self.rollout_is_threshold)
        return None

    @property
    def rs_bounds(self) -> tuple[Bounds, ...]:
        """Of each rejection the lowest and the highest value that is kept."""
        names = self.rejections
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


def _rejection_bounds(name: str, threshold: str) -> Bounds:
    if not name.endswith("_k1"):
        return -math.inf, _number("rollout_rs_threshold", threshold)
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
