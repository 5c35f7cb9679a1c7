"""The sequences of one step as flat arrays, and how they are cut into micro-batches.

A micro-batch holds whole sequences end to end, T tokens, without padding; packing.py keeps them
apart. S sequences, N trained tokens in a batch; R sequences with n trained tokens in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .examples import TrainingSequence

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FlatBatch:
    """All sequences of one step end to end.

    Args:
        tokens: int64, the tokens of all sequences.
        starts: int64 [S], first token of each sequence; `lengths`: int64 [S].
        trained: int64 [N], places in `tokens` that are trained on, rising.
        trained_starts: int64 [S + 1], where each sequence's part of `trained` begins.
        behaviour_logprobs: float32 [N], as recorded.
        old_logprobs: float32 [N], the same, or of the policy before the step.
        correction: float32 [N], what a token's policy loss is multiplied by; None for 1.
        temperatures: float32 [S].
    """

    tokens: Indices
    starts: Indices
    lengths: Indices
    trained: Indices
    trained_starts: Indices
    behaviour_logprobs: Floats
    old_logprobs: Floats
    temperatures: Floats
    correction: Floats | None = None

    @property
    def num_trained(self) -> Indices:
        """Trained tokens of each sequence, [S]."""
        return np.diff(self.trained_starts)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass takes.

    Args:
        input_ids: int64 [T], the sequences end to end; `lengths`: int64 [R].
        predictors: int64 [n], places in `input_ids` whose output predicts a trained token.
        targets: int64 [n], the tokens predicted there.
        sequence: int64 [n], which of the R sequences each belongs to.
        trained: int64 [n], the place of each in the batch's N trained tokens.
        temperatures: float32 [n], or None where all are 1.
    """

    input_ids: Indices
    lengths: Indices
    predictors: Indices
    targets: Indices
    sequence: Indices
    trained: Indices
    temperatures: Floats | None


_NONE = np.zeros(0, np.int64)
_EMPTY = MicroBatch(
    input_ids=np.zeros(1, np.int64),
    lengths=np.ones(1, np.int64),
    predictors=_NONE,
    targets=_NONE,
    sequence=_NONE,
    trained=_NONE,
    temperatures=None,
)


def flatten(sequences: Sequence[TrainingSequence], *, recomputed: bool = False) -> FlatBatch:
    """Lay the sequences end to end. The first token of a sequence is predicted by nothing.

    `recomputed` takes current_logprobs for the old ones.
    """
    lengths = np.fromiter((len(s.tokens) for s in sequences), np.int64, len(sequences))
    starts = np.cumsum(lengths) - lengths
    mask = _join([s.loss_mask for s in sequences], np.uint8)
    mask[starts] = 0
    trained = np.flatnonzero(mask)
    trained_starts = np.searchsorted(trained, np.append(starts, len(mask)))
    temperatures = (s.temperature for s in sequences)
    behaviour = _join([s.logprobs for s in sequences], np.float32)[trained]
    old = [s.current_logprobs if recomputed else s.logprobs for s in sequences]
    correction = [s.correction for s in sequences]
    return FlatBatch(
        tokens=_join([s.tokens for s in sequences], np.int64),
        starts=starts,
        lengths=lengths,
        trained=trained,
        trained_starts=trained_starts,
        behaviour_logprobs=behaviour,
        old_logprobs=_measured(old)[trained] if recomputed else behaviour,
        temperatures=np.fromiter(temperatures, np.float32, len(sequences)),
        correction=_measured(correction)[trained]
        if any(c is not None for c in correction)
        else None,
    )


def plan(lengths: Indices, budget: int) -> list[Indices]:
    """Which sequences share a micro-batch: indices into `lengths`, longest first.

    Sequences are taken by falling length (ties in the order given), so the plan is a function
    of the lengths alone. Each goes to the first micro-batch whose tokens stay within `budget`
    with it, or opens one; a sequence over the budget stands alone. Source: first-fit decreasing,
    at most 11 / 9 of the fewest micro-batches there can be, D. S. Johnson, 1973.
    """
    cuts: list[list[int]] = []
    room: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        place = next((p for p, free in enumerate(room) if free >= length), len(room))
        if place == len(room):
            cuts.append([])
            room.append(budget)
        cuts[place].append(i)
        room[place] -= length
    return [np.array(rows, np.int64) for rows in cuts]


def assemble(batch: FlatBatch, rows: Indices) -> MicroBatch:
    """The micro-batch of the sequences `rows`, in that order; of none, one token untrained."""
    if not len(rows):
        return _EMPTY
    lengths, starts = batch.lengths[rows], batch.starts[rows]
    offsets = np.cumsum(lengths) - lengths - starts
    counts = batch.num_trained[rows]
    sequence = np.repeat(np.arange(len(rows)), counts)
    trained = _ranges(batch.trained_starts[rows], counts)
    places = batch.trained[trained]
    temperatures = batch.temperatures[rows][sequence]
    return MicroBatch(
        input_ids=batch.tokens[_ranges(starts, lengths)],
        lengths=lengths,
        predictors=places + offsets[sequence] - 1,
        targets=batch.tokens[places],
        sequence=sequence,
        trained=trained,
        temperatures=None if (temperatures == 1).all() else temperatures,
    )


def _ranges(starts: Indices, counts: Indices) -> Indices:
    """Concatenation of arange(start, start + count) for every pair."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def _measured(parts: Sequence[Floats | None]) -> Floats:
    known = [p for p in parts if p is not None]
    assert len(known) == len(parts), "a batch is measured as a whole"
    return _join(known, np.float32)


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)
