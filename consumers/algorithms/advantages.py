"""How much better an experience was than expected: what weights its tokens in the policy loss.

Advantages are computed when a step is trained, from the rewards that the record of the
experience holds for its whole group, so a filtered sibling still counts in the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...schemas.errors import ConfigError
from ..learning.examples import TrainingExample
from .registry import ADVANTAGES

# one number for all trained tokens, one a trained token, or None: leave the experience out
Advantage = float | npt.NDArray[np.float64] | None
AdvantageFn = Callable[[Sequence[TrainingExample]], list[Advantage]]


def group_rewards(example: TrainingExample) -> tuple[float, ...]:
    """Rewards of the whole group; of itself alone where the record names no group."""
    return example.group_rewards or (example.reward,)


@ADVANTAGES.register("grpo")
@dataclass(frozen=True)
class GroupAdvantage:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), std unbiased; a group of one keeps its reward.

    Args:
        std_threshold: experiences of groups whose std is not above it are left out.
        std_cal_level: `batch` divides by the std of all rewards of the batch's groups.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; batch level: arXiv:2508.08221.
    """

    epsilon: float = 1e-6
    std_threshold: float | None = None
    duplicate_experiences: bool = False
    rank_penalty: float | None = None
    std_cal_level: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        if self.rank_penalty is not None or self.duplicate_experiences:
            raise ConfigError(
                "algorithm.advantage_fn_args: rank_penalty and duplicate_experiences are not "
                "available; only null and false are. Remove them."
            )
        if self.std_cal_level not in ("group", "batch"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: std_cal_level {self.std_cal_level!r} is neither "
                "'group' nor 'batch'."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One a experience; None under std_threshold."""
        batch_std = _batch_std(examples) if self.std_cal_level == "batch" else None
        statistics = {g: _mean_std(g) for g in {group_rewards(e) for e in examples}}
        advantages: list[Advantage] = []
        for example in examples:
            mean, std = statistics[group_rewards(example)]
            if self.std_threshold is not None and std <= self.std_threshold:
                advantages.append(None)
                continue
            scale = std if batch_std is None else batch_std
            advantages.append((example.reward - mean) / (scale + self.epsilon))
        return advantages


@ADVANTAGES.register("dr_grpo")
def dr_grpo() -> AdvantageFn:
    """A_i = r_i - mean(r); a group of one keeps its reward. Source: arXiv:2503.20783."""
    return lambda examples: [e.reward - _mean_std(group_rewards(e))[0] for e in examples]


@ADVANTAGES.register("reinforce")
def reinforce() -> AdvantageFn:
    """A_i = r_i. Source: Williams, Machine Learning 8, 1992."""
    return lambda examples: [e.reward for e in examples]


@ADVANTAGES.register("rloo")
def rloo() -> AdvantageFn:
    """A_i = r_i - mean of the others' rewards; a group of one keeps its reward.

    Source: Ahmadian et al., arXiv:2402.14740, section 3.3.
    """

    def advantage(example: TrainingExample) -> float:
        rewards = group_rewards(example)
        mean, _ = _mean_std(rewards)
        if len(rewards) == 1:
            return example.reward
        return (example.reward - mean) * len(rewards) / (len(rewards) - 1)

    return lambda examples: [advantage(e) for e in examples]


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
        returns = [_returns(token_rewards(e), self.gamma) for e in examples]
        whole = np.concatenate(returns) if returns else np.zeros(0)
        if len(whole) < 2:
            return list(returns)
        mean, scale = whole.mean(), np.sqrt(whole.var(ddof=1) + 1e-8)
        return [(r - mean) / scale for r in returns]


def token_rewards(example: TrainingExample) -> npt.NDArray[np.float64]:
    """Reward of each trained token, summing to the experience's total.

    A reward on a token that is not trained goes to the trained one before it, or to the first;
    what spans do not account for goes to the last.
    """
    masks = [s.loss_mask.astype(bool) & (np.arange(len(s.tokens)) > 0) for s in example.sequences]
    trained = np.concatenate(masks)
    num_trained = int(trained.sum())
    if not num_trained:
        return np.zeros(0)
    rewards = np.zeros(num_trained)
    if example.token_rewards is not None:
        receiver = np.maximum(np.cumsum(trained) - 1, 0)
        np.add.at(rewards, receiver, example.token_rewards)
    rewards[-1] += example.reward - rewards.sum()
    return rewards


def _returns(rewards: npt.NDArray[np.float64], gamma: float) -> npt.NDArray[np.float64]:
    if gamma == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns = np.zeros_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns


def _mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased std; (0, 1) of a single one, so that it keeps its value.

    Equal rewards give exactly their value and 0, so that no rounding passes for a signal.
    """
    if len(rewards) == 1:
        return 0.0, 1.0
    if min(rewards) == max(rewards):
        return rewards[0], 0.0
    return float(np.mean(rewards)), float(np.std(rewards, ddof=1))


def _batch_std(examples: Sequence[TrainingExample]) -> float:
    groups = {e.group_id: group_rewards(e) for e in examples}
    return _mean_std([r for rewards in groups.values() for r in rewards])[1]
