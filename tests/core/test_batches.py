from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.consumers.learning.batches import assemble, flatten, plan
from streamrft.consumers.learning.examples import TrainingSequence


def sequence(mask: list[int], *, first: int = 0, temperature: float = 1.0) -> TrainingSequence:
    """Tokens first, first + 1, ...; the log-prob of a token is a tenth of its id, negative."""
    tokens = np.arange(first, first + len(mask), dtype=np.int32)
    marks = np.array(mask, np.uint8)
    return TrainingSequence(tokens, marks, (-tokens / 10 * marks).astype(np.float32), temperature)


lengths = st.lists(st.integers(1, 600), min_size=1, max_size=60)


@given(lengths=lengths, budget=st.integers(1, 2000))
def test_a_plan_takes_every_sequence_once_within_the_budget(lengths: list[int], budget: int):
    array = np.array(lengths)
    cuts = plan(array, budget)
    assert sorted(np.concatenate(cuts).tolist()) == list(range(len(lengths)))
    for rows in cuts:
        assert array[rows].sum() <= budget or len(rows) == 1
        assert array[rows[0]] == array[rows].max()


@given(lengths=lengths, budget=st.integers(600, 2000))
def test_no_two_micro_batches_of_a_plan_would_fit_into_one(lengths: list[int], budget: int):
    sums = sorted(int(np.array(lengths)[rows].sum()) for rows in plan(np.array(lengths), budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(lengths=lengths)
def test_a_plan_is_a_function_of_the_lengths_in_order(lengths: list[int]):
    first, second = plan(np.array(lengths), 512), plan(np.array(lengths), 512)
    assert [r.tolist() for r in first] == [r.tolist() for r in second]


def test_equal_lengths_keep_their_order():
    assert [r.tolist() for r in plan(np.array([5, 7, 5, 5]), 10)] == [[1], [0, 2], [3]]
    longer, shorter = plan(np.tile([3, 4], 250), 1000)
    assert longer.tolist() == list(range(1, 500, 2)) and shorter.tolist() == list(range(0, 500, 2))


def test_a_short_sequence_fills_the_first_gap():
    assert [r.tolist() for r in plan(np.array([7, 6, 3, 2]), 10)] == [[0, 2], [1, 3]]


def test_nothing_needs_no_micro_batch():
    assert plan(np.zeros(0, np.int64), 512) == []


def test_a_trained_token_is_predicted_by_the_place_before_it():
    batch = flatten([sequence([0, 0, 1, 0, 1], first=10), sequence([0, 1, 1], first=20)])
    micro = assemble(batch, np.array([0, 1]))
    assert micro.input_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert micro.lengths.tolist() == [5, 3]
    predicting = micro.input_ids[micro.predictors]
    assert predicting.tolist() == [11, 13, 20, 21]
    assert micro.targets.tolist() == [12, 14, 21, 22]
    assert micro.sequence.tolist() == [0, 0, 1, 1]


def test_the_first_token_of_a_sequence_is_not_trained():
    batch = flatten([sequence([1, 1, 0], first=5), sequence([1, 0, 1], first=8)])
    assert batch.tokens[batch.trained].tolist() == [6, 10]
    assert batch.num_trained.tolist() == [1, 1]


def test_flattening_does_not_change_the_sequences():
    one = sequence([1, 1])
    flatten([one])
    assert one.loss_mask.tolist() == [1, 1]


@given(
    masks=st.lists(
        st.lists(st.integers(0, 1), min_size=2, max_size=9).filter(lambda m: any(m[1:])),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(1, 40),
)
def test_micro_batches_together_hold_every_trained_token_once(masks: list, budget: int):
    sequences = [sequence(m, first=100 * i, temperature=1 + i) for i, m in enumerate(masks)]
    batch = flatten(sequences)
    seen: list[int] = []
    for rows in plan(batch.lengths, budget):
        micro = assemble(batch, rows)
        owner = rows[micro.sequence]
        np.testing.assert_array_equal(micro.targets // 100, owner)
        np.testing.assert_allclose(batch.old_logprobs[micro.trained], -micro.targets / 10, 1e-6)
        np.testing.assert_array_equal(micro.input_ids[micro.predictors], micro.targets - 1)
        if micro.temperatures is not None:
            np.testing.assert_array_equal(micro.temperatures, 1 + owner)
        seen += micro.trained.tolist()
    expected = sum(sum(m[1:]) for m in masks)
    assert sorted(seen) == list(range(expected))


@pytest.mark.parametrize("temperatures, expected", [((1.0, 1.0), None), ((1.0, 0.5), [1.0, 0.5])])
def test_temperatures_are_left_out_when_all_are_one(temperatures: tuple, expected: list | None):
    batch = flatten([sequence([0, 1], temperature=t) for t in temperatures])
    found = assemble(batch, np.array([0, 1])).temperatures
    assert found is None if expected is None else found.tolist() == expected
