"""What an advantage function takes and gives; rewards of groups, and what of a token is known.

T tokens of a sequence, n trained tokens of an experience.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...learning.examples import TrainingExample

Values = npt.NDArray[np.float64]
# one number for all trained tokens, one a trained token, or None: leave the experience out
Advantage = float | Values | None
AdvantageFn = Callable[[Sequence[TrainingExample]], list[Advantage]]


def group_rewards(example: TrainingExample) -> tuple[float, ...]:
    """Rewards of the whole group; of itself alone where the record names no group."""
    return example.group_rewards or (example.reward,)


def mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased std; (0, 1) of a single one, so that it keeps its value.

    Equal rewards give exactly their value and 0, so that no rounding passes for a signal.
    """
    if len(rewards) == 1:
        return 0.0, 1.0
    if min(rewards) == max(rewards):
        return rewards[0], 0.0
    return float(np.mean(rewards)), float(np.std(rewards, ddof=1))


def trained(example: TrainingExample, name: str) -> Values:
    """Field `name` of the sequences (such as logprobs) at the trained tokens, float64 [n].

    Args:
        example: whose sequences all have the field.
        name: a field of TrainingSequence that holds one number a token.
    """
    parts = [getattr(s, name)[s.is_trained] for s in example.sequences]
    return np.concatenate(parts).astype(np.float64)
