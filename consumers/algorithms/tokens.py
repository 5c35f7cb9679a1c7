"""What policy, KL and entropy functions see of a micro-batch: one value a trained token.

N trained tokens of R whole sequences, so that a sequence's own statistics can be computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of one micro-batch, sequence after sequence.

    Args:
        logprobs: float32 [N] under the policy that is trained; carries the gradient.
        old_logprobs: float32 [N] of the behaviour policy, or of the policy before this step
            where the configuration asks for recomputed ones.
        advantages: float32 [N].
        sequence: int64 [N], the index of each token's sequence, 0..R-1.
        num_sequences: R.
        ref_logprobs: float32 [N] of the reference model, where a function needs them.
        is_expert: bool [N], tokens that an expert wrote; None where there are none.
        preferences: int64 [R], 1 for a wanted sequence and -1 for an unwanted one, 0 for neither.
        pairs: int64 [R], the pair of a sequence, 0..P-1, where preferences come in pairs.
        kl_baseline: KTO's z, at least 0: the policy's KL to the reference, the same for all.
        step: the optimiser step that this is part of, 1 for the first.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    num_sequences: int
    ref_logprobs: Tensor | None = None
    is_expert: Tensor | None = None
    preferences: Tensor | None = None
    pairs: Tensor | None = None
    kl_baseline: float = 0.0
    step: int = 1

    @property
    def log_ratio(self) -> Tensor:
        """The policy's log-prob less the old one, [N]."""
        return self.logprobs - self.old_logprobs

    @property
    def ratio(self) -> Tensor:
        """exp(logp - old_logp) [N], the exponent clamped to +-20."""
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def own(self, values: Tensor) -> Tensor:
        """Of `values` [N] those at tokens that the policy wrote: an expert's have no behaviour."""
        return values if self.is_expert is None else values[~self.is_expert]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over each sequence's trained tokens -> [R]."""
        zeros = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` [N] over each sequence's trained tokens -> [R]."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """A loss a token [N], and by-products [N] whose mean over the batch becomes actor/<name>.

    An expert's tokens do not count in a mean. Those named seq/<name> hold a value of the sequence
    at each token: the mean is over sequences.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """A policy loss. Pure: same tokens, same losses; aggregation comes afterwards.

    `is_zero_without_advantage`: tokens of advantage 0 get exactly no loss and no gradient, so
    that the learner may leave their sequences out of the forward pass.

    A loss may also have `loss_agg_mode`, its own default of the aggregation; `needs_reference`,
    true where it reads ref_logprobs; `is_sequence_level`, true where its loss is one of the
    sequence, repeated at every token, so that only seq-mean-token-mean gives the paper's mean;
    `is_paired`, true where it compares the two sequences of a pair; and `splits_experts`, true
    where an expert's tokens and the policy's own have each their mean.
    """

    @property
    def is_zero_without_advantage(self) -> bool:
        """See the class."""
        ...

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, one a token, to be minimised."""
        ...
