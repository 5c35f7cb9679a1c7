"""One importance ratio a sequence, its length-normalised likelihood ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import MAX_LOG_RATIO, TokenLoss, Tokens


@POLICY_LOSSES.register("gspo")
@dataclass(frozen=True)
class GspoLoss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean over the sequence of logp - old_logp).

    Every token has the value of s and, by a stop-gradient, its own part of the gradient:
    s_t = sg(s) exp(logp_t - sg(logp_t)).

    Source: GSPO, arXiv:2507.18071, section 4, and its GSPO-token for the gradient.
    """

    clip_range_low: float = 3e-4
    clip_range_high: float = 4e-4
    is_zero_without_advantage = True
    loss_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        if not (0 <= self.clip_range_low <= 1 and self.clip_range_high >= 0):
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: clip range [1 - {self.clip_range_low}, 1 + "
                f"{self.clip_range_high}] must lie around 1 and not below 0."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac and ppo_kl as by-products."""
        log_ratio = tokens.log_ratio.detach()
        mean = tokens.sequence_mean(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        own = (tokens.logprobs - tokens.logprobs.detach()).exp()
        ratio = mean.exp()[tokens.sequence] * own
        plain = -tokens.advantages * ratio
        clipped = -tokens.advantages * ratio.clamp(
            1 - self.clip_range_low, 1 + self.clip_range_high
        )
        metrics = {"ppo_kl": -log_ratio, "pg_clipfrac": (clipped > plain).float()}
        return TokenLoss(torch.maximum(plain, clipped), metrics)
