"""Learning from what was preferred, against a reference model.

d is a sequence's sum over its trained tokens of logp - ref_logp. A loss is one number a sequence,
repeated at its tokens, so that seq-mean-token-mean is the mean over pairs or over sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ....schemas.errors import ConfigError
from ..registry import POLICY_LOSSES
from ..tokens import TokenLoss, Tokens


@POLICY_LOSSES.register("dpo")
@dataclass(frozen=True)
class DpoLoss:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = d(chosen) - d(rejected).

    One h a pair: several pairs in a micro-batch have several sigmoids, whose losses are averaged.

    Args:
        label_smoothing: e, the share of pairs that may be labelled the wrong way round.
        loss_type: ipo takes (h - 1 / (2 beta))^2 instead.

    Source: DPO, arXiv:2305.18290, eq. 7; cDPO, E. Mitchell, "A note on DPO with noisy
    preferences", 2023; IPO, arXiv:2310.12036, eq. 17.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    is_zero_without_advantage = False
    is_sequence_level = True
    is_paired = True
    needs_reference = True
    loss_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: label_smoothing {self.label_smoothing} must lie "
                "in [0, 0.5)."
            )
        if self.loss_type not in ("sigmoid", "ipo"):
            raise ConfigError(
                f"algorithm.policy_loss_fn_args: loss_type {self.loss_type!r} is neither "
                "'sigmoid' nor 'ipo'."
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses; reward_accuracy, reward_margin, chosen_reward and rejected_reward beside."""
        assert tokens.pairs is not None and tokens.preferences is not None
        change = _log_ratios(tokens)
        num_pairs = int(tokens.pairs.max()) + 1 if len(tokens.pairs) else 0
        signed = change * tokens.preferences
        margin = torch.zeros(num_pairs, dtype=change.dtype, device=change.device)
        margin = margin.index_add(0, tokens.pairs, signed)
        losses = self.losses(margin)[tokens.pairs][tokens.sequence]
        rewards = self.beta * change.detach()
        means = {
            "reward_accuracy": (margin.detach() > 0).to(change.dtype)[tokens.pairs],
            "reward_margin": self.beta * margin.detach()[tokens.pairs],
            "chosen_reward": torch.where(tokens.preferences > 0, 2 * rewards, 0.0),
            "rejected_reward": torch.where(tokens.preferences < 0, 2 * rewards, 0.0),
        }
        return TokenLoss(losses, {f"seq/{n}": v[tokens.sequence] for n, v in means.items()})

    def losses(self, margin: Tensor) -> Tensor:
        """Loss of each pair [P] from its h [P]."""
        if self.loss_type == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        logits = self.beta * margin
        agreed, swapped = logsigmoid(logits), logsigmoid(-logits)
        return -(1 - self.label_smoothing) * agreed - self.label_smoothing * swapped


@POLICY_LOSSES.register("kto")
@dataclass(frozen=True)
class KtoLoss:
    """Unpaired: w (1 - sigmoid(beta (d - z))) of a wanted, w (1 - sigmoid(beta (z - d))) else.

    z is `tokens.kl_baseline`, the policy's KL to the reference, without gradient.

    Args:
        desirable_weight: w of wanted sequences; undesirable_weight: of the others.
        reward_threshold: rollouts with a reward above it are wanted; rows say it themselves.

    Source: KTO, arXiv:2402.01306, section 4.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reward_threshold: float = 0.5
    is_zero_without_advantage = False
    is_sequence_level = True
    needs_reference = True
    needs_kl_baseline = True
    loss_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Losses, and kl_to_reference as a by-product."""
        assert tokens.preferences is not None
        losses = self.losses(_log_ratios(tokens), tokens.preferences, tokens.kl_baseline)
        kl = torch.full_like(tokens.logprobs, tokens.kl_baseline).detach()
        return TokenLoss(losses[tokens.sequence], {"kl_to_reference": kl})

    def losses(self, change: Tensor, preferences: Tensor, baseline: float) -> Tensor:
        """Loss of each sequence [R] from its d and its preference, 1 or -1."""
        weight = torch.where(preferences > 0, self.desirable_weight, self.undesirable_weight)
        signed = preferences * self.beta * (change - baseline)
        return weight * (1 - signed.sigmoid())


def kto_baseline(mismatched: npt.NDArray[np.floating]) -> float:
    """KTO's z, max(0, mean): [M] sums of logp - ref_logp of answers to other prompts; of none 0."""
    return max(0.0, float(mismatched.mean())) if len(mismatched) else 0.0


def _log_ratios(tokens: Tokens) -> Tensor:
    """d, [R]."""
    assert tokens.ref_logprobs is not None
    return tokens.sequence_sum(tokens.logprobs - tokens.ref_logprobs)


def _check_beta(beta: float) -> None:
    if beta <= 0:
        raise ConfigError(f"algorithm.policy_loss_fn_args: beta {beta} must be above 0.")
