"""Tasksets: the rows to roll out, in an order that settings and a count alone decide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..schemas.errors import ConfigError
from ..schemas.events import is_id
from ..streams.rows import Row, Rows, conversation, flaw_of, open_rows, to_json
from .settings import TasksetSettings

_ASKING = tuple(
    f"{a}{k}_workflow" for a in ("", "async_") for k in ("simple", "math", "math_boxed")
)


class RowRef(NamedTuple):
    """One row in one pass over the tasksets."""

    taskset: str
    row: int
    epoch: int


class RowContent(NamedTuple):
    """What a task says of its row."""

    content: str
    workflow: str
    reward_fn: str


class Tasksets:
    """Several tasksets mixed in proportion to their lengths.

    The order is a pure function of the settings and the number of rows: a restarted scheduler
    goes on by counting what it published.
    """

    def __init__(self, settings: Sequence[TasksetSettings], rows: Sequence[Rows]) -> None:
        names = [s.name for s in settings]
        for name in names:
            if not is_id(name) or names.count(name) > 1:
                raise ConfigError(
                    f"taskset name {name!r}: must be unique among {names} and use only letters, "
                    "digits and . _ : -, since it begins the ids of its groups."
                )
        self._settings, self._rows = dict(zip(names, settings, strict=True)), list(rows)
        self._by_name = dict(zip(names, rows, strict=True))
        self._order = lru_cache(maxsize=2)(self._make_order)

    @classmethod
    def open(cls, settings: Sequence[TasksetSettings]) -> Tasksets:
        """Open the rows of every taskset.

        Raises:
            ConfigError, MissingExtra: as `open_rows`; or the first row lacks the column that its
                workflow asks.
        """
        if not settings:
            raise ConfigError(
                "no taskset is configured; set buffer.explorer_input.taskset with a name and a path"
            )
        opened = [
            open_rows(f"taskset {s.name!r}", s.path, split=s.split, subset=s.subset_name)
            for s in settings
        ]
        for s, rows in zip(settings, opened, strict=True):
            _check_columns(s, rows[0])
        return cls(settings, opened)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass."""
        return sum(len(rows) for rows in self._rows)

    def at(self, index: int) -> RowRef:
        """The `index`-th row that a run publishes, from 0, over all epochs."""
        epoch, place = divmod(index, self.rows_per_epoch)
        taskset_of, row_of = self._order(epoch)
        return RowRef(list(self._settings)[taskset_of[place]], int(row_of[place]), epoch)

    def read(self, ref: RowRef) -> RowContent:
        """The row and how it is rolled out."""
        settings, row = self._settings[ref.taskset], self._by_name[ref.taskset][ref.row]
        return RowContent(
            to_json(row),
            str(row.get(settings.workflow_key) or settings.workflow),
            str(row.get(settings.reward_fn_key) or settings.reward_fn),
        )

    def _make_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Taskset and row of every place of an epoch, each int64 [rows_per_epoch].

        Row i of n lies at (i + 1/2) / n of the epoch, so every stretch holds each taskset in
        proportion.
        """
        lengths = [len(rows) for rows in self._rows]
        taskset_of = np.repeat(np.arange(len(lengths)), lengths)
        row_of = np.concatenate(
            [_selected(s, n, epoch) for s, n in zip(self._settings.values(), lengths, strict=True)]
        )
        where = np.concatenate([(np.arange(n) + 0.5) / n for n in lengths])
        order = np.argsort(where, kind="stable")
        return taskset_of[order], row_of[order]


def _selected(settings: TasksetSettings, length: int, epoch: int) -> npt.NDArray[np.int64]:
    """Row numbers of one taskset in the order of one epoch.

    RandomState, because NumPy promises that its streams never change.
    """
    if settings.selector == "sequential":
        return np.arange(length)
    random = np.random.RandomState([settings.selector_seed & 0xFFFFFFFF, epoch])
    if settings.selector == "shuffle":
        return random.permutation(length)
    if settings.selector == "random":
        return random.randint(0, length, length)
    raise ConfigError(
        f"taskset {settings.name!r}: selector {settings.selector!r} is not known; use sequential, "
        "shuffle or random"
    )


def _check_columns(settings: TasksetSettings, row: Row) -> None:
    """Refuse a column of questions that is not there, before a task of it fails in every slot.

    Only for workflows of ours: what another reads of a row is its own matter.
    """
    asks = row.get(settings.workflow_key) or settings.workflow
    if asks in _ASKING and settings.prompt_key not in row:
        messages_of(row, settings, 0)


def messages_of(row: Row, settings: TasksetSettings, number: int = -1) -> list[dict[str, Any]]:
    """The conversation that a row begins, with its system prompt if it has one.

    Raises:
        ConfigError: the row has no `prompt_key`, nor `messages_key` where messages are expected,
            or its messages are none. Names the row by its `number`, from 0, where that is given.
    """
    where = f"taskset {settings.name!r}" + (f" row {number}" if number >= 0 else "")
    given = row.get(settings.messages_key) if settings.prompt_type == "messages" else None
    if not isinstance(given, list):
        given = row.get(settings.prompt_key)
    if given is None or given == []:
        raise ConfigError(
            f"{where}: no prompt under {settings.prompt_key!r}; it has {', '.join(row)}. Set "
            "format.prompt_key."
        )
    if isinstance(given, list) and (flaw := flaw_of(given)):
        raise ConfigError(f"{where}: {flaw}")
    return conversation(row, given, settings)


def truth_of(row: Row, settings: TasksetSettings) -> str | None:
    """The known answer of a row; what follows the last `####` where there is one, as in GSM8K."""
    answer = row.get(settings.response_key)
    return None if answer is None else str(answer).rsplit("####", 1)[-1].strip()
