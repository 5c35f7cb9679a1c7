"""Rows of a file for supervised training, in an order that seed and epoch alone decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schemas.errors import ConfigError, InvalidEvent
from ...schemas.events import Cut
from ...streams.rows import Row, Rows
from ..learning.examples import TrainingExample
from .source import Batch

# rows at the very beginning that may be refused before the configuration is
MAX_REFUSED = 100


class RowSource:
    """Batches of rows, over and over; its position is {"epoch", "index", "refused"}. See `Source`.

    Batches run across the ends of epochs; only the very last one may be short. The order of an
    epoch is a pure function of (seed, epoch), so nothing but the position needs saving. A row of
    which nothing can be made is told once and left out, in every epoch; others take its place.
    """

    def __init__(
        self,
        rows: Rows,
        to_examples: Callable[[Row, int], Sequence[TrainingExample]],
        on_refused: Callable[[int, Row | None, str], None],
        *,
        batch_rows: int,
        total_epochs: int | None,
        seed: int,
        shuffle: bool = True,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """Open at the start, or at what `position()` gave at a checkpoint.

        `to_examples` makes of (row, its number in the file) what the learner takes, and raises
        InvalidEvent where it cannot; `on_refused` is told the number, the row where there is one,
        and why. `total_epochs` None never ends.
        """
        self.num_read = 0
        self._rows, self._to_examples, self._batch_rows = rows, to_examples, batch_rows
        self._on_refused = on_refused
        self._seed, self._shuffle = seed, shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._end = None if total_epochs is None else total_epochs * len(rows)
        saved = position or {"epoch": 0, "index": 0}
        self._next: int = saved["epoch"] * len(rows) + saved["index"]
        self._stop = self._next
        self._refused = set[int](saved.get("refused", ()))

    def poll(self, steps_done: int, timeout_ms: int) -> int:
        """Nothing comes by itself."""
        return 0

    def next_batch(self, steps_done: int) -> Batch | None:
        """The rows after those taken; None after the last epoch.

        Raises:
            ConfigError: nothing could be made of any of the first rows.
        """
        self._stop, num_rows, examples = self._next, 0, list[TrainingExample]()
        while num_rows < self._batch_rows and self._stop != self._end:
            epoch, index = divmod(self._stop, len(self._rows))
            made = self._examples(int(self._order(epoch)[index]))
            self._stop += 1
            num_rows += bool(made)
            examples += made
        if not examples:
            self._next = self._stop
        return Batch(examples) if examples else None

    def recorded(self, cut: Cut) -> Batch:
        """Rows are not cut: their order and the position say it all."""
        raise AssertionError(f"step {cut.step} has a cut, and rows are trained")

    def take(self, batch: Batch) -> None:
        """Go on behind it."""
        self._next = self._stop

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
        return {"epoch": epoch, "index": index, "refused": sorted(self._refused)}

    def commit(self, position: Mapping[str, Any]) -> None:
        """Nothing on the log is consumed."""

    def close(self) -> None:
        """Nothing is held."""

    def _examples(self, number: int) -> Sequence[TrainingExample]:
        """Of one row; none where it is refused."""
        if number in self._refused:
            return ()
        row = None
        try:
            row = self._rows[number]
            return self._to_examples(row, number)
        except (ConfigError, InvalidEvent) as error:
            self._refuse(number, row, str(error))
            return ()

    def _refuse(self, number: int, row: Row | None, why: str) -> None:
        self._refused.add(number)
        self._on_refused(number, row, why)
        count = len(self._refused)
        if count == len(self._rows) or count == MAX_REFUSED == self._stop + 1:
            raise ConfigError(f"nothing can be made of any of the first {count} rows. {why}")

    def _make_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Row numbers of one epoch; RandomState, because NumPy promises never to change it."""
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.RandomState([self._seed & 0xFFFFFFFF, epoch]).permutation(len(self._rows))
