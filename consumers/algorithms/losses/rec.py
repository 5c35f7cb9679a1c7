"""The REINFORCE family in one loss: which tokens count, how much, and what holds them back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import MAX_LOG_RATIO, TokenLoss, Tokens

CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = (
    "none",
    "importance_sampling",
    "truncated_importance_sampling",
    "gspo_importance_sampling",
    "advantage",
)
REGULARIZERS = ("none", "k2", "forward-kl")


@POLICY_LOSSES.register("rec")
@dataclass(frozen=True)
class RecLoss:
    """-A sg(w) logp where r is in range, plus the regulariser; r = exp(logp - old_logp).

    Args:
        clip_mode: the range. two-side: 1 - low <= r <= 1 + high; one-side: only the bound
            towards which A pushes; ring: two-side, and also r <= 1 - low' for A >= 0 and
            r >= 1 + high' for A <= 0; gspo-one-side: one-side on exp(mean(logp - old_logp)).
        weight: w, which is 1, r, r clipped to [1 - low', 1 + high'], exp(mean(logp - old_logp)),
            or exp(A / temp).
        regularizer: k2 adds regularizer_coef (logp - old_logp)^2, forward-kl adds
            -regularizer_coef logp.
        fix_opd_advantage: A + old_logp - sg(logp), for a teacher's advantage off policy.

    Source: REC, "Group-relative REINFORCE is secretly an off-policy algorithm",
    arXiv:2509.24203; k2: Kimi k1.5, arXiv:2501.12599; advantage weight: AWR, arXiv:1910.00177.
    """

    clip_mode: str = "none"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    epsilon_low_prime: float = 0.6
    epsilon_high_prime: float = 2.0
    weight: str = "none"
    regularizer: str = "none"
    regularizer_coef: float = 0.0
    temp: float = 1.0
    fix_opd_advantage: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("clip_mode", CLIP_MODES),
            ("weight", WEIGHTS),
            ("regularizer", REGULARIZERS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"algorithm.policy_loss_fn_args: {name} {getattr(self, name)!r} is none of "
                    f"{', '.join(allowed)}."
                )
        for name in ("epsilon_low", "epsilon_low_prime"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"algorithm.policy_loss_fn_args: {name} {getattr(self, name)} must be above 0 "
                    "and not above 1."
                )
        for name in ("epsilon_high", "epsilon_high_prime", "temp"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"algorithm.policy_loss_fn_args: {name} {getattr(self, name)} must be above 0."
                )

    @property
    def is_zero_without_advantage(self) -> bool:
        """Only where nothing but the advantage makes a loss."""
        return self.regularizer == "none" and not self.fix_opd_advantage

    @property
    def loss_agg_mode(self) -> str:
        """A range of whole sequences is averaged by sequences."""
        return "seq-mean-token-mean" if self.clip_mode == "gspo-one-side" else "token-mean"

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac and ppo_kl as by-products."""
        log_ratio = tokens.log_ratio.detach()
        is_in_range = self._is_in_range(tokens)
        advantages = tokens.advantages
        weighted = advantages * self._weight(tokens)
        if self.fix_opd_advantage:
            weighted = weighted - log_ratio
        losses = (-weighted * tokens.logprobs).masked_fill(~is_in_range, 0.0)
        if self.regularizer == "k2":
            losses = losses + self.regularizer_coef * tokens.log_ratio.square()
        elif self.regularizer == "forward-kl":
            losses = losses - self.regularizer_coef * tokens.logprobs
        return TokenLoss(losses, {"ppo_kl": -log_ratio, "pg_clipfrac": (~is_in_range).float()})

    def _is_in_range(self, tokens: Tokens) -> Tensor:
        ratio, good, bad = tokens.ratio.detach(), tokens.advantages >= 0, tokens.advantages <= 0
        if self.clip_mode == "none":
            return torch.ones_like(good)
        if self.clip_mode == "gspo-one-side":
            ratio = _sequence_ratio(tokens)
        above, below = ratio >= 1 - self.epsilon_low, ratio <= 1 + self.epsilon_high
        if self.clip_mode in ("one-side", "gspo-one-side"):
            return (good & below) | (bad & above)
        if self.clip_mode == "two-side":
            return above & below
        far_below = ratio <= 1 - self.epsilon_low_prime
        far_above = ratio >= 1 + self.epsilon_high_prime
        return (above & below) | (good & far_below) | (bad & far_above)

    def _weight(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio.detach()
        if self.weight == "importance_sampling":
            return ratio
        if self.weight == "truncated_importance_sampling":
            return ratio.clamp(1 - self.epsilon_low_prime, 1 + self.epsilon_high_prime)
        if self.weight == "gspo_importance_sampling":
            return _sequence_ratio(tokens)
        if self.weight == "advantage":
            return (tokens.advantages / self.temp).exp()
        return torch.ones_like(ratio)


def _sequence_ratio(tokens: Tokens) -> Tensor:
    """The exponential of the sequence's mean log-ratio at each of its tokens, [N]."""
    mean = tokens.sequence_mean(tokens.log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return mean.exp()[tokens.sequence]
