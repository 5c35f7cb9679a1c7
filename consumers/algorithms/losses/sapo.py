"""A soft gate in place of a hard clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("sapo")
@dataclass(frozen=True)
class SapoLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A, r = exp(logp - old_logp).

    The gradient is weighed by 4 s (1 - s), s the sigmoid: 1 on policy, falling on both sides.
    Trinity differentiates -A sg(gate) logp, whose weight is 2 on policy and grows with r.

    Args:
        tau_pos: for A > 0; tau_neg: for the others, not below tau_pos.

    Source: SAPO, arXiv:2511.20347.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    is_zero_without_advantage = True

    def __post_init__(self) -> None:
        if not 0 < self.tau_pos <= self.tau_neg:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: tau_pos {self.tau_pos} must be above 0 and not "
                f"above tau_neg {self.tau_neg}."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and avg_soft_gate, avg_ratio and ppo_kl as by-products."""
        ratio, advantages = tokens.ratio, tokens.advantages
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(ratio.dtype)
        gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
        metrics = {
            "ppo_kl": -tokens.log_ratio.detach(),
            "avg_ratio": ratio.detach(),
            "avg_soft_gate": gate.detach(),
        }
        return TokenLoss(-advantages * gate, metrics)
