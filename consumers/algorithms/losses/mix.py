"""The policy's own rollouts and an expert's in one batch.

The two means are taken apart: (1 - mu) mean over own tokens + mu mean over expert tokens.
`splits_experts` asks for that; the losses here carry only the factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens
from .ppo import PpoLoss
from .sft import SftPhiLoss


@dataclass(frozen=True, kw_only=True)
class _OwnByPpo:
    """Own tokens under PPO, an expert's under another loss."""

    clip_range: float = 0.2
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    is_zero_without_advantage = False
    splits_experts = True

    def _mixed(self, tokens: Tokens, expert: torch.Tensor, mu: float) -> TokenLoss:
        """`expert`: losses if all tokens were an expert's. By-products are mu and those of PPO."""
        own = PpoLoss(self.clip_range, self.clip_range_low, self.clip_range_high)(tokens)
        is_expert = tokens.is_expert
        if is_expert is None:
            is_expert = torch.zeros_like(tokens.sequence, dtype=torch.bool)
        losses = torch.where(is_expert, mu * expert, (1 - mu) * own.losses)
        return TokenLoss(losses, {**own.metrics, "mu": torch.full_like(losses, mu).detach()})


@POLICY_LOSSES.register("mix")
@dataclass(frozen=True, kw_only=True)
class MixLoss(_OwnByPpo):
    """(1 - mu) PPO of own tokens, mu (-logp) of an expert's.

    Source: MIX of Trinity-RFT, arXiv:2505.17826; PPO, arXiv:1707.06347.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 1:
            raise ConfigError(f"algorithm.policy_loss_fn_args: mu {self.mu} must lie in [0, 1].")

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, mu and those of PPO."""
        return self._mixed(tokens, -tokens.logprobs, self.mu)


@POLICY_LOSSES.register("mix_chord")
@dataclass(frozen=True, kw_only=True)
class ChordLoss(_OwnByPpo):
    """As mix, with mu of the step and the expert's tokens weighed by p (1 - p).

    mu rises linearly to mu_peak over mu_warmup_steps, then falls as a cosine to mu_valley over
    mu_decay_steps, and stays there.

    Args:
        enable_phi_function: false takes -logp of an expert's tokens, not -sg(p (1 - p)) logp.

    Source: CHORD, arXiv:2508.11408.
    """

    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.mu_peak <= 1 and 0 <= self.mu_valley <= 1):
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: mu_peak {self.mu_peak} and mu_valley "
                f"{self.mu_valley} must lie in [0, 1]."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, mu of the step and those of PPO."""
        expert = -tokens.logprobs
        if self.enable_phi_function:
            expert = SftPhiLoss().losses(tokens.logprobs)
        return self._mixed(tokens, expert, self.mu(tokens.step))

    def mu(self, step: int) -> float:
        """Weight of the expert's tokens in optimiser step `step`, 1 for the first."""
        if step < self.mu_warmup_steps:
            return step / self.mu_warmup_steps * self.mu_peak
        if step >= self.mu_warmup_steps + self.mu_decay_steps:
            return self.mu_valley
        progress = (step - self.mu_warmup_steps) / self.mu_decay_steps
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.mu_valley + (self.mu_peak - self.mu_valley) * cosine
