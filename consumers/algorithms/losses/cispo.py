"""REINFORCE under a clipped weight, so that no token's gradient is lost."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("cispo")
@dataclass(frozen=True)
class CispoLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A logp, r = exp(logp - old_logp).

    Args:
        enable_mask_clip: leave out tokens with r above 1 + mask_clip_range_high and A > 0, or
            below 1 - mask_clip_range_low and A < 0, as PPO's clip would.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, section 3.1.
    """

    clip_range_low: float = 1.0
    clip_range_high: float = 0.28
    enable_mask_clip: bool = False
    mask_clip_range_low: float = 1.0
    mask_clip_range_high: float = 0.28
    is_zero_without_advantage = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac, masked_frac and ppo_kl as by-products."""
        ratio, advantages = tokens.ratio.detach(), tokens.advantages
        low, high = 1 - self.clip_range_low, 1 + self.clip_range_high
        losses = -ratio.clamp(low, high) * advantages * tokens.logprobs
        metrics = {
            "ppo_kl": -tokens.log_ratio.detach(),
            "pg_clipfrac": ((ratio < low) | (ratio > high)).float(),
        }
        if self.enable_mask_clip:
            is_masked = (ratio > 1 + self.mask_clip_range_high) & (advantages > 0)
            is_masked |= (ratio < 1 - self.mask_clip_range_low) & (advantages < 0)
            losses = losses.masked_fill(is_masked, 0.0)
            metrics["masked_frac"] = is_masked.float()
        return TokenLoss(losses, metrics)
