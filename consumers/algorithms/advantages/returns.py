"""Credit token by token: discounted returns, and advantages against a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, Values, trained


@ADVANTAGES.register("reinforceplusplus")
@dataclass(frozen=True)
class ReturnAdvantage:
    """Discounted return of every token, whitened over all trained tokens of the batch.

    G_t = sum_k gamma^k r_(t+k) over the experience's trained tokens; the outcome reward stands
    at the last one, less what spans gave earlier. A = (G - mean(G)) / sqrt(var(G) + 1e-8), var
    unbiased. Source: REINFORCE++, arXiv:2501.03262.
    """

    gamma: float = 1.0

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience."""
        return list(whitened([discounted(token_rewards(e), self.gamma) for e in examples]))


@ADVANTAGES.register("ppo")
@dataclass(frozen=True)
class CriticAdvantage:
    """Generalised advantage estimation against the critic's values, whitened over the batch.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = sum_k (gamma lam)^k delta_(t+k) over the trained
    tokens, V = 0 after the last. Source: GAE, arXiv:1506.02438, eq. 16; PPO, arXiv:1707.06347.
    """

    gamma: float = 1.0
    lam: float = 1.0
    measures = frozenset({"values"})

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience; its sequences carry `values`."""
        return list(whitened([self.raw(e) for e in examples]))

    def raw(self, example: TrainingExample) -> Values:
        """Advantages before whitening, [n]; A + V is what the critic is to learn."""
        return gae(token_rewards(example), trained(example, "values"), self.gamma, self.lam)


def gae(rewards: Values, values: Values, gamma: float, lam: float) -> Values:
    """A_t of one experience, [n], from its token rewards [n] and values [n]. See above."""
    following = np.append(values[1:], 0.0)
    return discounted(rewards + gamma * following - values, gamma * lam)


def whitened(parts: Sequence[Values]) -> list[Values]:
    """Every part less the mean over all, by sqrt(var + 1e-8); unchanged under two values.

    Equal values give exactly 0, so that no rounding passes for a signal.
    """
    whole = np.concatenate(parts) if parts else np.zeros(0)
    if len(whole) < 2:
        return list(parts)
    if whole.min() == whole.max():
        return [np.zeros_like(part) for part in parts]
    mean, scale = whole.mean(), np.sqrt(whole.var(ddof=1) + 1e-8)
    return [(part - mean) / scale for part in parts]


def token_rewards(example: TrainingExample) -> Values:
    """Reward of each trained token, summing to the experience's total.

    A reward on a token that is not trained goes to the trained one before it, or to the first;
    what spans do not account for goes to the last.
    """
    is_chosen = np.concatenate([s.is_trained for s in example.sequences])
    num_trained = int(is_chosen.sum())
    if not num_trained:
        return np.zeros(0)
    rewards = np.zeros(num_trained)
    if example.token_rewards is not None:
        receiver = np.maximum(np.cumsum(is_chosen) - 1, 0)
        np.add.at(rewards, receiver, example.token_rewards)
    rewards[-1] += example.reward - rewards.sum()
    return rewards


def discounted(rewards: Values, gamma: float) -> Values:
    """G_t = r_t + gamma G_(t+1), [n]."""
    if gamma == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns = np.zeros_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns
