"""From a loss a token to one loss: the weight of a token by its sequence.

Every mode is a weighted sum of token losses, with weights that depend on the whole batch. They
are computed before the first micro-batch, so how the batch is cut changes nothing. S sequences
have at least one trained token; others are not counted. n_s is the number of trained tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .registry import AGGREGATIONS

Counts = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


@AGGREGATIONS.register("token-mean")
def token_mean(num_trained: Counts, *, horizon: int) -> Weights:
    """Every token alike: w = 1 / sum_s n_s. Source: DAPO, arXiv:2503.14476."""
    return _counted(num_trained) / max(1, int(num_trained.sum()))


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(num_trained: Counts, *, horizon: int) -> Weights:
    """Mean over sequences of the sum over tokens: w = 1 / S."""
    counted = _counted(num_trained)
    return counted / max(1.0, counted.sum())


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(num_trained: Counts, *, horizon: int) -> Weights:
    """Mean over sequences of the mean over tokens: w = 1 / (S n_s).

    Source: DeepSeekMath, arXiv:2402.03300, eq. 3.
    """
    return seq_mean_token_sum(num_trained, horizon=horizon) / np.maximum(1, num_trained)


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(num_trained: Counts, *, horizon: int) -> Weights:
    """Mean over sequences of the sum over tokens by a constant: w = 1 / (S horizon).

    Source: Dr. GRPO, arXiv:2503.20783. Trinity leaves out 1 / S, which makes the loss depend on
    how the batch is cut into micro-batches.
    """
    return seq_mean_token_sum(num_trained, horizon=horizon) / max(1, horizon)


def _counted(num_trained: Counts) -> Weights:
    return (num_trained > 0).astype(np.float64)
