"""The clipped surrogate of PPO with Trinity's arguments, for GRPO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import MAX_LOG_RATIO, TokenLoss, Tokens


@POLICY_LOSSES.register("ppo")
@dataclass(frozen=True)
class PpoLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c (dual clip).

    r = exp(logp - old_logp), the exponent clamped to +-20.

    Args:
        clip_range: both sides, where clip_range_low or clip_range_high is not given.
        clip_ratio_c: c > 1, the ratio at which tokens of negative advantage stop counting more.
        enable_sequence_masking: leave out the tokens of negative advantage in sequences with
            mean(old_logp - logp) > delta_sequence_masking.
        fallback_to_policy_gradient: r has value 1 whatever the behaviour log-probs are.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729; asymmetric clip,
    DAPO, arXiv:2503.14476; off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """

    clip_range: float = 0.2
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    clip_ratio_c: float = 3.0
    enable_sequence_masking: bool = False
    delta_sequence_masking: float = 0.1
    fallback_to_policy_gradient: bool = False
    is_zero_without_advantage = True

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: clip_ratio_c {self.clip_ratio_c} must be above 1."
            )
        if not (0 <= self._low <= 1 and self._high >= 0):
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: clip range [1 - {self._low}, 1 + {self._high}] "
                "must lie around 1 and not below 0."
            )

    @property
    def _low(self) -> float:
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def _high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac, pg_clipfrac_lower and ppo_kl as by-products."""
        advantages = tokens.advantages
        log_ratio = tokens.logprobs - self._old(tokens)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self._low, 1 + self._high)
        upper = torch.maximum(plain, clipped)
        bound = -advantages * self.clip_ratio_c
        losses = torch.where(advantages < 0, torch.minimum(bound, upper), upper)
        metrics = {
            "ppo_kl": -log_ratio.detach(),
            "pg_clipfrac": (clipped > plain).float(),
            "pg_clipfrac_lower": ((upper > bound) & (advantages < 0)).float(),
        }
        if self.enable_sequence_masking:
            is_masked = (advantages < 0) & self._is_far(tokens, log_ratio.detach())
            losses = losses.masked_fill(is_masked, 0.0)
            metrics["seq_mask/masked_tokens"] = is_masked.float()
        return TokenLoss(losses, metrics)

    def _old(self, tokens: Tokens) -> torch.Tensor:
        return tokens.logprobs.detach() if self.fallback_to_policy_gradient else tokens.old_logprobs

    def _is_far(self, tokens: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
        mean_kl = tokens.sequence_mean(-log_ratio)
        return (mean_kl > self.delta_sequence_masking)[tokens.sequence]
