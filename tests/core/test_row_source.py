"""Rows are read in an order that seed and epoch alone decide, and resumed where training stood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.consumers.inputs import open_rows_of
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.settings import AlgorithmSettings, SftSource, TrainerSettings
from streamrft.consumers.sources.rows import RowSource
from streamrft.schemas.errors import ConfigError, InvalidEvent
from streamrft.streams.rows import JsonlRows

ROWS = [{"row": i} for i in range(7)]


def example(row, number: int) -> list[TrainingExample]:
    assert row["row"] == number
    return [TrainingExample(f"sft.{number}:0:row", f"sft.{number}", 0, number, ())]


def nothing_refused(number: int, row, why: str) -> None:
    raise AssertionError(f"row {number}: {why}")


def source(position=None, *, to_examples=example, on_refused=nothing_refused, **fields):
    return RowSource(
        ROWS,
        to_examples,
        on_refused,
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


def odd_rows_are_refused(row, number: int) -> list[TrainingExample]:
    if number % 2:
        raise InvalidEvent(f"row {number} is odd")
    return example(row, number)


@pytest.mark.parametrize("taken", range(3))
def test_refused_rows_are_told_once_and_others_take_their_place(taken: int):
    told: list[tuple[int, str]] = []

    def tell(number: int, row, why: str) -> None:
        assert row == ROWS[number]
        told.append((number, why))

    def opened(position=None) -> RowSource:
        return source(position, to_examples=odd_rows_are_refused, on_refused=tell)

    rows, batches = opened(), []
    for _ in range(taken):
        batch = rows.next_batch(0)
        assert batch is not None
        batches.append([e.number for e in batch.examples])
        rows.take(batch)
    batches += drain(opened(json.loads(json.dumps(rows.position()))))
    assert [len(b) for b in batches] == [3, 3, 2]
    numbers = [n for b in batches for n in b]
    assert sorted(numbers[:4]) == sorted(numbers[4:]) == [0, 2, 4, 6]
    assert sorted(told) == [(n, f"row {n} is odd") for n in (1, 3, 5)]


def test_a_line_that_is_no_row_is_refused_and_its_neighbours_go_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": 0}\nno row\n{"row": 2}\n')
    told = []
    rows = RowSource(
        JsonlRows(path),
        lambda row, number: example(row, number),
        lambda *why: told.append(why),
        batch_rows=3,
        total_epochs=1,
        seed=5,
    )
    (batch,) = drain(rows)
    assert sorted(batch) == [0, 2]
    ((number, row, why),) = told
    assert (number, row) == (1, None) and f"{path}:2: no JSON" in why


@pytest.mark.parametrize("index", [0, 3])
def test_a_configuration_that_reads_no_row_at_all_is_an_error(index: int):
    """Rows without an end are not gone through for ever, wherever that begins."""

    def none(row, number: int) -> list[TrainingExample]:
        raise InvalidEvent(f"row {number} has no prompt")

    told = []
    rows = source(
        {"epoch": 0, "index": index},
        to_examples=none,
        on_refused=lambda *why: told.append(why),
        total_epochs=None,
    )
    with pytest.raises(ConfigError, match="any of the first 7 rows. row . has no prompt"):
        rows.next_batch(0)
    assert len(told) == 7


def test_a_file_that_is_not_there_is_told_under_its_key(tmp_path):
    rows = SftSource(str(tmp_path / "gone.jsonl"))
    settings = TrainerSettings("model", "uri", AlgorithmSettings("sft"), sft=rows)
    key = r"buffer\.trainer_input\.experience_buffer"
    with pytest.raises(ConfigError, match=rf"^{key}: .*gone.jsonl does not exist.*Set its path to"):
        open_rows_of(settings)
