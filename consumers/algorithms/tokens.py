"""What policy, KL and entropy functions see of a micro-batch: one value a trained token.

N trained tokens of R whole sequences, so that a sequence's own statistics can be computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of one micro-batch, sequence after sequence.

    Args:
        logprobs: float32 [N] under the policy that is trained; carries the gradient.
        old_logprobs: float32 [N] of the behaviour policy.
        advantages: float32 [N].
        sequence: int64 [N], the index of each token's sequence, 0..R-1.
        num_sequences: R.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    num_sequences: int

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` [N] over each sequence's trained tokens -> [R]."""
        zeros = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        sums = zeros.index_add(0, self.sequence, values)
        counts = zeros.index_add(0, self.sequence, torch.ones_like(values))
        return sums / counts.clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """A loss a token [N], and by-products [N] whose mean over the batch becomes actor/<name>."""

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """A policy loss. Pure: same tokens, same losses; aggregation comes afterwards.

    `is_zero_without_advantage`: tokens of advantage 0 get exactly no loss and no gradient, so
    that the learner may leave their sequences out of the forward pass.
    """

    @property
    def is_zero_without_advantage(self) -> bool:
        """See the class."""
        ...

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, one a token, to be minimised."""
        ...
