"""Rollouts of the log with rows of an expert beside them: as many rows in every batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schemas.events import Cut
from .online import OnlineSource
from .rows import RowSource
from .source import Batch


class MixedSource:
    """Batches of an `OnlineSource`, each followed by the next rows. See `Source`.

    Rows have no members: a cut names the rollouts, and which rows stand behind them follows from
    how many steps were trained, so a recorded cut has the same ones again.
    """

    def __init__(self, online: OnlineSource, rows: RowSource) -> None:
        """`rows` never ends."""
        self._online, self._rows = online, rows

    @property
    def num_read(self) -> int:
        """Records of the log."""
        return self._online.num_read

    def poll(self, steps_done: int, timeout_ms: int) -> int:
        """Read on on the log."""
        return self._online.poll(steps_done, timeout_ms)

    def next_batch(self, steps_done: int) -> Batch | None:
        """As of the log, with rows. Raises as both."""
        batch = self._online.next_batch(steps_done)
        return None if batch is None else self._with_rows(batch, steps_done)

    def recorded(self, cut: Cut) -> Batch:
        """The batch of a cut, with the same rows as then. Raises as both."""
        return self._with_rows(self._online.recorded(cut), cut.step - 1)

    def take(self, batch: Batch) -> None:
        """Rollouts and rows are trained."""
        self._online.take(Batch(batch.experiences, batch.members))
        self._rows.take(Batch(batch.examples[len(batch.members) :]))

    @property
    def produced_length(self) -> float | None:
        """Of the rollouts."""
        return self._online.produced_length

    @property
    def is_finished(self) -> bool:
        """Whether no rollout is left and none will come."""
        return self._online.is_finished

    def blocker(self, step: int) -> str:
        """What the rollouts of `step` wait for."""
        return self._online.blocker(step)

    def position(self) -> dict[str, Any]:
        """That of the log, and under `experts` that of the rows."""
        return {**self._online.position(), "experts": self._rows.position()}

    def commit(self, position: Mapping[str, Any]) -> None:
        """As of the log."""
        self._online.commit(position)

    def close(self) -> None:
        """Stop reading."""
        self._online.close()

    def _with_rows(self, batch: Batch, steps_done: int) -> Batch:
        rows = self._rows.next_batch(steps_done)
        assert rows is not None, "rows of an expert never end"
        return Batch([*batch.examples, *rows.examples], batch.members)
