"""A reward less one number: what of it was to be expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ....schemas.errors import ConfigError
from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, AdvantageFn, group_rewards, mean_std


@ADVANTAGES.register("reinforce")
def reinforce() -> AdvantageFn:
    """A_i = r_i. Source: Williams, Machine Learning 8, 1992."""
    return lambda examples: [e.reward for e in examples]


@ADVANTAGES.register("dr_grpo")
def dr_grpo() -> AdvantageFn:
    """A_i = r_i - mean(r); a group of one keeps its reward. Source: arXiv:2503.20783."""
    return lambda examples: [e.reward - mean_std(group_rewards(e))[0] for e in examples]


@ADVANTAGES.register("rloo")
def rloo() -> AdvantageFn:
    """A_i = r_i - mean of the others' rewards; a group of one keeps its reward.

    Source: Ahmadian et al., arXiv:2402.14740, section 3.3.
    """

    def advantage(example: TrainingExample) -> float:
        rewards = group_rewards(example)
        mean, _ = mean_std(rewards)
        if len(rewards) == 1:
            return example.reward
        return (example.reward - mean) * len(rewards) / (len(rewards) - 1)

    return lambda examples: [advantage(e) for e in examples]


@ADVANTAGES.register("remax")
def remax() -> AdvantageFn:
    """A_i = r_i - b, b the reward of the greedy rollout of the same task.

    Source: ReMax, arXiv:2310.10505.
    """

    def advantage(example: TrainingExample) -> float:
        assert example.baseline_reward is not None, "the catalogue says what remax waits for"
        return example.reward - example.baseline_reward

    return lambda examples: [advantage(e) for e in examples]


@ADVANTAGES.register("opmd_verl")
@ADVANTAGES.register("opmd")
@dataclass(frozen=True)
class MirrorDescentAdvantage:
    """A_i = r_i - b; b is mean(r), or tau log(mean(exp(r / tau))); a group of one keeps its reward.

    Source: OPMD, appendix A of Trinity-RFT, arXiv:2505.17826; Kimi k1.5, arXiv:2501.12599,
    for the log-mean-exp.
    """

    opmd_baseline: Literal["mean", "logavgexp"] = "mean"
    tau: float = 1.0

    def __post_init__(self) -> None:
        if self.opmd_baseline not in ("mean", "logavgexp"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: opmd_baseline {self.opmd_baseline!r} is neither "
                "'mean' nor 'logavgexp'."
            )
        if self.tau <= 0:
            raise ConfigError(f"algorithm.advantage_fn_args: tau {self.tau} must be above 0.")

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One number an experience."""
        return [e.reward - self._baseline(group_rewards(e)) for e in examples]

    def _baseline(self, rewards: Sequence[float]) -> float:
        mean, std = mean_std(rewards)
        if self.opmd_baseline == "mean" or len(rewards) == 1 or std == 0:
            return mean
        scaled = np.array(rewards) / self.tau
        top = scaled.max()
        return float(self.tau * (top + np.log(np.mean(np.exp(scaled - top)))))


@ADVANTAGES.register("asymre_verl")
@ADVANTAGES.register("asymre")
@dataclass(frozen=True)
class AsymmetricAdvantage:
    """A_i = r_i - (mean(r) + baseline_shift); a group of one keeps its reward.

    A shift below 0 raises every advantage, so off-policy failures push less than successes pull.
    Source: AsymRE, arXiv:2506.20520.
    """

    baseline_shift: float = -0.1

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One number an experience."""
        return [self._advantage(e.reward, group_rewards(e)) for e in examples]

    def _advantage(self, reward: float, rewards: Sequence[float]) -> float:
        if len(rewards) == 1:
            return reward
        return reward - mean_std(rewards)[0] - self.baseline_shift


@ADVANTAGES.register("rec")
@dataclass(frozen=True)
class RecAdvantage:
    """A_i = r_i - mean(r), divided by the biased std + epsilon if std_normalize.

    Args:
        drop: `balance` gives advantage 0 to members below the mean that are more than those that
            are not, and takes the statistics of the others. Trinity chooses whom at random; here
            the last slots go, so that a step can be trained again.

    A group of one keeps its reward. Source: REC, arXiv:2509.24203.
    """

    epsilon: float = 1e-6
    std_normalize: bool = False
    drop: Literal["balance"] | None = None

    def __post_init__(self) -> None:
        if self.drop not in (None, "balance"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: drop {self.drop!r} is neither null nor 'balance'."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One number an experience."""
        return [self._advantage(e) for e in examples]

    def _advantage(self, example: TrainingExample) -> float:
        rewards = np.array(group_rewards(example))
        kept = self._kept(rewards)
        index = example.group_slot_index
        if 0 <= index < len(rewards) and not kept[index]:
            return 0.0
        chosen = rewards[kept]
        mean, scale = (float(chosen.mean()), float(chosen.std())) if len(chosen) > 1 else (0.0, 1.0)
        if len(chosen) > 1 and chosen.min() == chosen.max():
            mean, scale = float(chosen[0]), 0.0
        return (example.reward - mean) / (scale + self.epsilon if self.std_normalize else 1.0)

    def _kept(self, rewards: np.ndarray) -> np.ndarray:
        is_kept = np.ones(len(rewards), bool)
        below = np.flatnonzero(rewards < rewards.mean())
        num_extra = 2 * len(below) - len(rewards)
        if self.drop == "balance" and num_extra > 0 and len(rewards) > 1:
            is_kept[below[len(below) - num_extra :]] = False
        return is_kept
