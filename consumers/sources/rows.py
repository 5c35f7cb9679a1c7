"""Rows of a file for supervised training, in an order that seed and epoch alone decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schemas.events import Cut
from ...streams.rows import Row, Rows
from ..learning.examples import TrainingExample
from .source import Batch


class RowSource:
    """Batches of rows, over and over; its position is {"epoch", "index"}. See `Source`.

    Batches run across the ends of epochs; only the very last one may be short. The order of an
    epoch is a pure function of (seed, epoch), so nothing but the position needs saving.
    """

    def __init__(
        self,
        rows: Rows,
        to_examples: Callable[[Row, int], Sequence[TrainingExample]],
        *,
        batch_rows: int,
        examples_per_row: int = 1,
        total_epochs: int | None,
        seed: int,
        shuffle: bool = True,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """Open at the start, or at what `position()` gave at a checkpoint.

        `to_examples` makes of (row, its number in the file) what the learner takes, always
        `examples_per_row` of them; `total_epochs` None never ends.
        """
        self.num_read = 0
        self._rows, self._to_examples, self._batch_rows = rows, to_examples, batch_rows
        self._per_row = examples_per_row
        self._seed, self._shuffle = seed, shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._end = None if total_epochs is None else total_epochs * len(rows)
        saved = position or {"epoch": 0, "index": 0}
        self._next: int = saved["epoch"] * len(rows) + saved["index"]

    def poll(self, steps_done: int, timeout_ms: int) -> int:
        """Nothing comes by itself."""
        return 0

    def next_batch(self, steps_done: int) -> Batch | None:
        """The rows after those taken; None after the last epoch."""
        stop = self._next + self._batch_rows
        if self._end is not None:
            stop = min(stop, self._end)
        places = [divmod(i, len(self._rows)) for i in range(self._next, stop)]
        numbers = [int(self._order(epoch)[index]) for epoch, index in places]
        examples = [e for n in numbers for e in self._to_examples(self._rows[n], n)]
        return Batch(examples) if examples else None

    def recorded(self, cut: Cut) -> Batch:
        """Rows are not cut: their order and the position say it all."""
        raise AssertionError(f"step {cut.step} has a cut, and rows are trained")

    def take(self, batch: Batch) -> None:
        """Go on behind it."""
        self._next += len(batch.examples) // self._per_row

    @property
    def produced_length(self) -> float | None:
        """Nothing is produced."""
        return None

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are done."""
        return self._end is not None and self._next >= self._end

    def blocker(self, step: int) -> str:
        """Rows are always there."""
        return f"rows of step {step}"

    def position(self) -> dict[str, Any]:
        """Plain JSON."""
        epoch, index = divmod(self._next, len(self._rows))
        return {"epoch": epoch, "index": index}

    def commit(self, position: Mapping[str, Any]) -> None:
        """Nothing on the log is consumed."""

    def close(self) -> None:
        """Nothing is held."""

    def _make_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Row numbers of one epoch; RandomState, because NumPy promises never to change it."""
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.RandomState([self._seed & 0xFFFFFFFF, epoch]).permutation(len(self._rows))
