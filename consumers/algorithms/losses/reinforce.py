"""Policy gradients without a clip: plain, importance-weighted, tapered and mirror descent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("reinforce")
@dataclass(frozen=True)
class ReinforceLoss:
    """-A logp; what `rollout_correction.loss_type: reinforce` weighs. Source: Williams, 1992."""

    is_zero_without_advantage = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and ppo_kl as a by-product."""
        return TokenLoss(
            -tokens.advantages * tokens.logprobs, {"ppo_kl": -tokens.log_ratio.detach()}
        )


@POLICY_LOSSES.register("importance_sampling")
@dataclass(frozen=True)
class ImportanceSamplingLoss:
    """-A r, r = exp(logp - old_logp), not clipped.

    Source: Kakade and Langford, "Approximately optimal approximate reinforcement learning", 2002;
    the surrogate of PPO, arXiv:1707.06347, eq. 6.
    """

    is_zero_without_advantage = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and ppo_kl as a by-product."""
        return TokenLoss(-tokens.advantages * tokens.ratio, {"ppo_kl": -tokens.log_ratio.detach()})


@POLICY_LOSSES.register("topr")
@dataclass(frozen=True)
class ToprLoss:
    """-sg(a) A logp, a = 1 where A > advantage_threshold, else r clipped to [0, 1].

    r = exp(logp - old_logp) of the token, as in Trinity; the paper's is of the whole sequence.
    Source: TOPR, arXiv:2503.14286.
    """

    advantage_threshold: float = 0.0
    is_zero_without_advantage = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac (tokens whose r was cut to 1) and ppo_kl as by-products."""
        ratio = tokens.ratio.detach()
        is_good = tokens.advantages > self.advantage_threshold
        weight = torch.where(is_good, torch.ones_like(ratio), ratio.clamp(0, 1))
        metrics = {
            "ppo_kl": -tokens.log_ratio.detach(),
            "pg_clipfrac": (~is_good & (ratio > 1)).float(),
        }
        return TokenLoss(-weight * tokens.advantages * tokens.logprobs, metrics)


@POLICY_LOSSES.register("opmd")
@dataclass(frozen=True)
class MirrorDescentLoss:
    """-A logp / (1 + tau). Source: OPMD, appendix A of Trinity-RFT, arXiv:2505.17826."""

    tau: float = 1.0
    is_zero_without_advantage = True

    def __post_init__(self) -> None:
        if self.tau <= -1:
            raise ConfigError(f"algorithm.policy_loss_fn_args: tau {self.tau} must be above -1.")

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and ppo_kl as a by-product."""
        losses = -tokens.advantages * tokens.logprobs / (1 + self.tau)
        return TokenLoss(losses, {"ppo_kl": -tokens.log_ratio.detach()})
