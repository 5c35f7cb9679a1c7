"""Rows are read in an order that seed and epoch alone decide, and resumed where training stood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.sources.rows import RowSource

ROWS = [{"row": i} for i in range(7)]


def example(row, number: int) -> list[TrainingExample]:
    assert row["row"] == number
    return [TrainingExample(f"sft.{number}:0:row", f"sft.{number}", 0, number, ())]


def source(position=None, **fields) -> RowSource:
    return RowSource(
        ROWS,
        example,
        **{"batch_rows": 3, "total_epochs": 2, "seed": 5, "position": position, **fields},
    )


def drain(rows: RowSource) -> list[list[int]]:
    batches = []
    while (batch := rows.next_batch(0)) is not None:
        batches.append([e.number for e in batch.examples])
        rows.take(batch)
    assert rows.is_finished
    return batches


def test_every_epoch_has_every_row_once():
    batches = drain(source())
    assert [len(b) for b in batches] == [3, 3, 3, 3, 2]
    numbers = [n for b in batches for n in b]
    assert sorted(numbers[:7]) == sorted(numbers[7:]) == list(range(7))
    assert numbers[:7] != numbers[7:]


def test_order_is_that_of_the_file_without_shuffle():
    assert [n for b in drain(source(shuffle=False)) for n in b] == [*range(7), *range(7)]


def test_order_never_changes_between_versions():
    assert [n for b in drain(source(total_epochs=1)) for n in b] == [1, 4, 3, 5, 6, 2, 0]


@given(st.integers(0, 5))
def test_resumed_rows_are_those_not_yet_taken(taken: int):
    rows = source()
    before = []
    for _ in range(taken):
        if (batch := rows.next_batch(0)) is not None:
            before.append([e.number for e in batch.examples])
            rows.take(batch)
    rows.next_batch(0)
    again = source(json.loads(json.dumps(rows.position())))
    assert before + drain(again) == drain(source())


@pytest.mark.parametrize("num_batches", [3, 30])
def test_rows_never_end_without_a_number_of_epochs(num_batches: int):
    rows = source(total_epochs=None)
    for _ in range(num_batches):
        batch = rows.next_batch(0)
        assert batch is not None and len(batch.examples) == 3
        rows.take(batch)
    assert not rows.is_finished
