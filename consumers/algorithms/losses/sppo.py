"""A softmax policy's PPO: the log-ratio in place of the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("sppo")
@dataclass(frozen=True)
class SppoLoss:
    """-A log(r) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0; r = exp(logp - old_logp).

    Source: functional mirror ascent, sPPO, arXiv:2108.05828.
    """

    epsilon: float = 0.3
    is_zero_without_advantage = True

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: epsilon {self.epsilon} must not be below 0."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and pg_clipfrac and ppo_kl as by-products."""
        ratio = tokens.ratio.detach()
        is_out = (ratio < 1 / (1 + self.epsilon)) | (ratio > 1 + self.epsilon)
        losses = (-tokens.advantages * tokens.log_ratio).masked_fill(is_out, 0.0)
        metrics = {"ppo_kl": -tokens.log_ratio.detach(), "pg_clipfrac": is_out.float()}
        return TokenLoss(losses, metrics)
