"""What a trainer reads, opened as its settings say: the log, rows of a file, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..schemas.events import now_ms
from ..streams.lineage import Lineage
from ..streams.log import Record
from ..streams.process import Process
from ..streams.rows import Row, Rows, open_rows, to_json
from .announcer import Announcer
from .learning.examples import TrainingExample
from .learning.learner import Learner
from .learning.supervised import examples_of_row
from .settings import SftSource, TrainerSettings
from .sources.members import BatchRules
from .sources.mixed import MixedSource
from .sources.online import OnlineSource
from .sources.rows import RowSource
from .sources.source import Source

Position = Mapping[str, Any]


def open_rows_of(settings: TrainerSettings) -> Rows | None:
    """The rows that are trained alone or beside rollouts; None where there are none.

    Raises:
        ConfigError, MissingExtra: see `open_rows`.
    """
    source = settings.sft or settings.experts
    if source is None:
        return None
    buffer = "experience_buffer" if settings.sft else "auxiliary_buffers"
    name = f"buffer.trainer_input.{buffer}"
    return open_rows(name, source.path, split=source.split, subset=source.subset_name)


def num_steps(settings: TrainerSettings, rows: Rows | None) -> int | None:
    """Steps of all epochs of rows; None online, where the scheduler decides."""
    if rows is None or settings.sft is None:
        return None
    return -(-settings.sft.total_epochs * len(rows) // settings.train_batch_size)


@dataclass(frozen=True)
class Inputs:
    """Opens the source of one trainer."""

    process: Process
    settings: TrainerSettings
    announcer: Announcer
    learner: Learner

    def open(self, lineage: Lineage, rows: Rows | None, position: Position | None) -> Source:
        """At the start, or at the `position` that a checkpoint holds."""
        settings = self.settings
        if settings.sft is not None and rows is not None:
            epochs = None if settings.total_steps else settings.sft.total_epochs
            return self._rows(settings.sft, rows, settings.train_batch_size, epochs, position)
        online = self._online(lineage, position)
        if settings.experts is None or rows is None:
            return online
        at = position.get("experts") if position else None
        return MixedSource(
            online, self._rows(settings.experts, rows, settings.expert_rows, None, at)
        )

    def _online(self, lineage: Lineage, position: Position | None) -> OnlineSource:
        settings = self.settings
        rules = BatchRules(
            batch_groups=settings.batch_groups,
            max_staleness=settings.max_staleness,
            source_max_staleness=settings.source_max_staleness,
            in_number_order=settings.deterministic,
            ends_by_steps=settings.total_steps is not None,
            in_pairs=settings.algorithm.algorithm_type == "dpo",
        )
        source = OnlineSource(
            self.process.log,
            self.process.topics,
            self.announcer,
            rules,
            lineage,
            lineage.branch,
            position=position,
            reader=self.process.name,
            check=self.learner.check,
        )
        source.catch_up()
        return source

    def _rows(
        self,
        source: SftSource,
        rows: Rows,
        batch_rows: int,
        total_epochs: int | None,
        position: Position | None,
    ) -> RowSource:
        settings, tokenizer = self.settings, self.learner.tokenizer

        def to_examples(row: Row, number: int) -> list[TrainingExample]:
            made = examples_of_row(
                row, tokenizer, source, number=number, max_tokens=settings.max_sequence_tokens
            )
            for example in made:
                self.learner.check(example)
            is_expert = source is settings.experts
            return [dataclasses.replace(e, is_expert=is_expert) for e in made]

        def on_refused(number: int, row: Row | None, why: str) -> None:
            value = None if row is None else to_json(row).encode()
            record = Record(source.path, 0, number, now_ms(), None, value, ())
            self.announcer.dead_letter(record, why, self.process.name)

        return RowSource(
            rows,
            to_examples,
            on_refused,
            batch_rows=batch_rows,
            total_epochs=total_epochs,
            seed=settings.seed,
            shuffle=source.shuffle,
            position=position,
        )
