"""Imitation: maximum likelihood of the marked tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .registry import POLICY_LOSSES
from .tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("sft")
@dataclass(frozen=True)
class SftLoss:
    """-logp of every trained token."""

    is_zero_without_advantage = False

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses; there are no by-products."""
        return TokenLoss(-tokens.logprobs)
