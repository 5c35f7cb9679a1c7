"""Agents that act in several steps: each sequence of a trajectory is one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ....schemas.errors import ConfigError
from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, Values, group_rewards, mean_std
from .group import GroupAdvantage
from .returns import discounted


@ADVANTAGES.register("step_wise_grpo")
@dataclass(frozen=True)
class StepWiseAdvantage:
    """The trajectory's advantage in its group, for every one of its steps.

    Args:
        enable_step_norm: divide by the number of steps.
        std_threshold: groups of one, or whose std is not above it, are left out.
        std_cal_level: `batch` divides by the std of all rewards, `none` by nothing.

    Source: multi-step GRPO of Trinity-RFT, arXiv:2505.17826, after rLLM.
    """

    epsilon: float = 1e-6
    enable_step_norm: bool = False
    std_threshold: float | None = None
    std_cal_level: Literal["group", "batch", "none"] = "group"

    def __post_init__(self) -> None:
        if self.std_cal_level not in ("group", "batch", "none"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: std_cal_level {self.std_cal_level!r} is none of "
                "'group', 'batch' and 'none'."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One number an experience; None under std_threshold."""
        if self.std_cal_level == "none":
            values = [e.reward - mean_std(group_rewards(e))[0] for e in examples]
        else:
            values = GroupAdvantage(self.epsilon, std_cal_level=self.std_cal_level)(examples)
        return [self._scaled(e, v) for e, v in zip(examples, values, strict=True)]

    def _scaled(self, example: TrainingExample, value: Advantage) -> Advantage:
        rewards = group_rewards(example)
        if self.std_threshold is not None and (
            len(rewards) == 1 or mean_std(rewards)[1] <= self.std_threshold
        ):
            return None
        assert value is not None
        return value / len(example.sequences) if self.enable_step_norm else value


@ADVANTAGES.register("gigpo")
@dataclass(frozen=True)
class GroupInGroupAdvantage:
    """A = A_E + omega A_S: the episode in its group, and the step among steps from one state.

    A_E compares sums of step rewards within a group; A_S compares discounted returns of the
    group's steps with equal state (Trinity's of the whole batch, whatever the task). Each is
    (x - mean) / (scale + epsilon), where scale is 1 or with fnorm std the unbiased std; one alone
    is x in A_E and 0 in A_S.

    Source: GiGPO, arXiv:2505.10978.
    """

    omega: float = 1.0
    gamma: float = 1.0
    fnorm: Literal["none", "std"] = "none"
    epsilon: float = 1e-6
    step_reward_key: str = "step_reward"
    env_state_hash_key: str = "env_state_hash"

    def __post_init__(self) -> None:
        if self.fnorm not in ("none", "std"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: fnorm {self.fnorm!r} is neither 'none' nor 'std'."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One array of the trained tokens an experience."""
        rewards = [step_rewards(e) for e in examples]
        episodes = self._among([e.group_id for e in examples], [float(r.sum()) for r in rewards])
        returns = [discounted(r, self.gamma) for r in rewards]
        states = [_state(e, i) for e in examples for i in range(len(e.sequences))]
        flat = [float(x) for r in returns for x in r]
        steps = iter(self._among(states, flat, alone=0.0, unknown=""))
        return [
            _spread(e, [episode + self.omega * next(steps) for _ in e.sequences])
            for e, episode in zip(examples, episodes, strict=True)
        ]

    def _among(
        self,
        keys: Sequence[str],
        values: Sequence[float],
        *,
        alone: float | None = None,
        unknown: str | None = None,
    ) -> list[float]:
        """Each value against those of the same key; `alone` for one by itself, None keeps it."""
        members: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            members.setdefault(key, []).append(i)
        result = [0.0] * len(values)
        for key, indices in members.items():
            own = [values[i] for i in indices]
            mean, std = mean_std(own)
            scale = std if self.fnorm == "std" else 1.0
            for i in indices:
                result[i] = (values[i] - mean) / (scale + self.epsilon)
                if key == unknown or (len(indices) == 1 and alone is not None):
                    result[i] = 0.0
        return result


def step_rewards(example: TrainingExample) -> Values:
    """Reward of each step, [steps]; the outcome at the last one where steps have none."""
    if example.step_rewards is not None:
        return np.array(example.step_rewards, np.float64)
    rewards = np.zeros(len(example.sequences))
    rewards[-1] = example.reward
    return rewards


def _state(example: TrainingExample, step: int) -> str:
    """Key of the state before a step within the step's own group, empty where unknown."""
    state = example.state_hashes[step] if example.state_hashes else ""
    return f"{example.group_id} {state}" if state else ""


def _spread(example: TrainingExample, values: Sequence[float]) -> Values:
    counts = [int(s.is_trained.sum()) for s in example.sequences]
    return np.repeat(np.array(values), counts)
