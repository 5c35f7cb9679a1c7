"""Imitation: maximum likelihood of the marked tokens, all alike or by how sure the policy is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("sft")
@dataclass(frozen=True)
class SftLoss:
    """-logp of every trained token; also of continued pre-training, where all are trained.

    Source: maximum likelihood; RAFT, arXiv:2304.06767, for rollouts that a filter chose.
    """

    is_zero_without_advantage = False

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses; there are no by-products."""
        return TokenLoss(-tokens.logprobs)


@POLICY_LOSSES.register("sft_is")
@dataclass(frozen=True)
class SftImportanceLoss:
    """-sg(p) logp, p = exp(logp): the expert as a policy of probability 1.

    Source: CHORD, arXiv:2508.11408.
    """

    is_zero_without_advantage = False

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses; there are no by-products."""
        return TokenLoss(-tokens.logprobs.detach().exp() * tokens.logprobs)


@POLICY_LOSSES.register("sft_phi")
@dataclass(frozen=True)
class SftPhiLoss:
    """-sg(p (1 - p)) logp, p = exp(logp): most for tokens of which the policy is least sure.

    Args:
        cutoff_prob: tokens of a larger p have no gradient.

    Source: CHORD, arXiv:2508.11408.
    """

    cutoff_prob: float = 1.0
    is_zero_without_advantage = False

    def __post_init__(self) -> None:
        if not 0 < self.cutoff_prob <= 1:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: cutoff_prob {self.cutoff_prob} must be above 0 "
                "and not above 1."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses; there are no by-products."""
        return TokenLoss(self.losses(tokens.logprobs))

    def losses(self, logprobs: Tensor) -> Tensor:
        """[N] -> [N]."""
        likelihood = logprobs.detach().exp()
        if self.cutoff_prob < 1:
            logprobs = logprobs.clamp(max=math.log(self.cutoff_prob))
        return -likelihood * (1 - likelihood) * logprobs
