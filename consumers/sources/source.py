"""What the trainer asks of any source of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...schemas.events import Cut, CutMember
from ..learning.examples import TrainingExample


@dataclass(frozen=True)
class Batch:
    """What one step trains on, in order; members[i] names examples[i], rows behind have none."""

    examples: Sequence[TrainingExample]
    members: Sequence[CutMember] = ()

    @property
    def experiences(self) -> Sequence[TrainingExample]:
        """What the step's cut names, without an expert's rows beside it; rows alone are all."""
        return self.examples[: len(self.members) or None]


class Source(Protocol):
    """Batches for one trainer, called from its thread before and after every step.

    `num_read` counts the records read so far: as long as it grows, something is coming.
    Nothing is taken by looking: a batch is final when `take` was called, and the position that a
    checkpoint saves says so. After a crash a source opened at that position goes on from there.
    """

    @property
    def num_read(self) -> int:
        """Records read so far."""
        ...

    def poll(self, steps_done: int, timeout_ms: int) -> int:
        """Read on, waiting up to `timeout_ms`; returns how many records came."""
        ...

    def next_batch(self, steps_done: int) -> Batch | None:
        """The batch of step `steps_done + 1`, or None when it is not there yet; idempotent.

        Raises:
            A retriable StreamrftError when a payload cannot be fetched now: ask again.
        """
        ...

    def recorded(self, cut: Cut) -> Batch:
        """The batch of a cut that an earlier trainer published. Raises as `next_batch`."""
        ...

    def take(self, batch: Batch) -> None:
        """These are trained."""
        ...

    @property
    def produced_length(self) -> float | None:
        """Mean trained tokens of all experiences that came so far, dropped ones too; else None."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left and nothing will come."""
        ...

    def blocker(self, step: int) -> str:
        """What the batch of `step` waits for, for people."""
        ...

    def position(self) -> dict[str, Any]:
        """Plain JSON."""
        ...

    def commit(self, position: Mapping[str, Any]) -> None:
        """Tell the log how far training is, a hint for lag; nothing depends on it."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...
