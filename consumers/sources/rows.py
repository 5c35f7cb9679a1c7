"""Rows of a file for supervised training, in an order that seed and epoch alone decide."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...streams.rows import Row, Rows


class RowSource:
    """Batches of rows, over and over; its position is {"epoch", "index"}.

    Batches run across the ends of epochs; only the very last one may be short. The order of an
    epoch is a pure function of (seed, epoch), so nothing but the position needs saving.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_rows: int,
        total_epochs: int | None,
        seed: int,
        shuffle: bool = True,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """`total_epochs` None never ends; `position`: what `position()` gave at a checkpoint."""
        self._rows, self._batch_rows, self._total_epochs = rows, batch_rows, total_epochs
        self._seed, self._shuffle = seed, shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)
        saved = position or {"epoch": 0, "index": 0}
        self._next: int = saved["epoch"] * len(rows) + saved["index"]

    @property
    def num_steps(self) -> int | None:
        """Batches in all epochs; None when they never end."""
        end = self._end
        return None if end is None else -(-end // self._batch_rows)

    def next_batch(self) -> list[tuple[int, int, Row]] | None:
        """(epoch, row number, row) of the next batch; None after the last epoch."""
        stop = self._next + self._batch_rows
        if self._end is not None:
            stop = min(stop, self._end)
        places = [divmod(i, len(self._rows)) for i in range(self._next, stop)]
        self._next = max(stop, self._next)
        batch = [(epoch, int(self._order(epoch)[index])) for epoch, index in places]
        return [(epoch, row, self._rows[row]) for epoch, row in batch] or None

    def position(self) -> dict[str, Any]:
        """Plain JSON."""
        epoch, index = divmod(self._next, len(self._rows))
        return {"epoch": epoch, "index": index}

    @property
    def _end(self) -> int | None:
        return None if self._total_epochs is None else self._total_epochs * len(self._rows)

    def _make_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Row numbers of one epoch; RandomState, because NumPy promises never to change it."""
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.RandomState([self._seed & 0xFFFFFFFF, epoch]).permutation(len(self._rows))
