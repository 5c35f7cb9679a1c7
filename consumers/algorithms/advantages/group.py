"""An experience against the siblings of its group.

Advantages are computed when a step is trained, from the rewards that the record of the
experience holds for its whole group, so a filtered sibling still counts in the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ....schemas.errors import ConfigError
from ...learning.examples import TrainingExample
from ..registry import ADVANTAGES
from .advantage import Advantage, group_rewards, mean_std, trained


@ADVANTAGES.register("grpo")
@dataclass(frozen=True)
class GroupAdvantage:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), std unbiased; a group of one keeps its reward.

    Args:
        std_threshold: experiences of groups whose std is not above it are left out.
        duplicate_experiences: other groups of the batch are trained twice in their places, as many
            and whichever chance has it. See preparation.refilled.
        std_cal_level: `batch` divides by the std of all rewards of the batch's groups.
        rank_penalty: p, r_i becomes r_i (1 - p rank_i / n) before everything else, where rank_i
            is 0 for the member of the lowest mean behaviour log-prob and n members are in the
            batch; filtered siblings keep their reward.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; batch level: arXiv:2508.08221; rank:
    He et al., "Rewarding the unlikely", arXiv:2506.02355; duplicates: POLARIS, C. An et al., 2025.
    """

    epsilon: float = 1e-6
    std_threshold: float | None = None
    duplicate_experiences: bool = False
    rank_penalty: float | None = None
    std_cal_level: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        if self.duplicate_experiences and self.std_threshold is None:
            raise ConfigError(
                "algorithm.advantage_fn_args: duplicate_experiences fills the places of groups "
                "that std_threshold leaves out, and there is none. Set it, such as to 0.0."
            )
        if self.std_cal_level not in ("group", "batch"):
            raise ConfigError(
                f"algorithm.advantage_fn_args: std_cal_level {self.std_cal_level!r} is neither "
                "'group' nor 'batch'."
            )

    def __call__(self, examples: Sequence[TrainingExample]) -> list[Advantage]:
        """One a experience; None under std_threshold."""
        own = [e.reward for e in examples]
        groups = [group_rewards(e) for e in examples]
        if self.rank_penalty is not None:
            own, groups = _penalised(examples, self.rank_penalty)
        by_group = {e.group_id: rewards for e, rewards in zip(examples, groups, strict=True)}
        everyone = [r for rewards in by_group.values() for r in rewards]
        batch_std = mean_std(everyone)[1] if self.std_cal_level == "batch" and everyone else None
        statistics = {rewards: mean_std(rewards) for rewards in set(groups)}
        advantages: list[Advantage] = []
        for reward, rewards in zip(own, groups, strict=True):
            mean, std = statistics[rewards]
            if self.std_threshold is not None and std <= self.std_threshold:
                advantages.append(None)
                continue
            scale = std if batch_std is None else batch_std
            advantages.append((reward - mean) / (scale + self.epsilon))
        return advantages


def _penalised(
    examples: Sequence[TrainingExample], penalty: float
) -> tuple[list[float], list[tuple[float, ...]]]:
    """Own reward and rewards of the group under the rank penalty, one of each an example."""
    ranks = _ranks(examples)
    own = [e.reward * (1 - penalty * ranks[i]) for i, e in enumerate(examples)]
    changed: dict[str, dict[int, float]] = {}
    for e, reward in zip(examples, own, strict=True):
        changed.setdefault(e.group_id, {})[e.group_slot_index] = reward
    groups: list[tuple[float, ...]] = []
    for e, reward in zip(examples, own, strict=True):
        if not e.group_rewards:
            groups.append((reward,))
            continue
        replaced = changed[e.group_id]
        groups.append(tuple(replaced.get(i, r) for i, r in enumerate(e.group_rewards)))
    return own, groups


def _ranks(examples: Sequence[TrainingExample]) -> Mapping[int, float]:
    """By index of the example its rank / n, least likely first; ties by their order."""
    groups: dict[str, list[int]] = {}
    for i, e in enumerate(examples):
        groups.setdefault(e.group_id, []).append(i)
    means = [_mean_logprob(e) for e in examples]
    ranks: dict[int, float] = {}
    for members in groups.values():
        order = sorted(members, key=lambda i: means[i])
        ranks |= {i: rank / len(members) for rank, i in enumerate(order)}
    return ranks


def _mean_logprob(example: TrainingExample) -> float:
    logprobs = trained(example, "logprobs")
    return float(np.mean(logprobs)) if len(logprobs) else 0.0
