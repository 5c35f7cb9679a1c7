from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.consumers.learning.shares import balanced, shares


@pytest.mark.parametrize(
    "costs, num_parts, sums",
    [
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # the worked example of Karmarkar and Karp
        ([5], 3, [0, 0, 5]),
        ([], 2, [0, 0]),
        ([4, 4, 4, 4], 4, [4, 4, 4, 4]),
    ],
)
def test_parts_are_near_each_other(costs: list[int], num_parts: int, sums: list[int]):
    parts = balanced(costs, num_parts)
    assert sorted(sum(costs[i] for i in part) for part in parts) == sums


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 5))
def test_every_sequence_is_passed_once_and_nobody_waits_for_a_pass(costs: list[int], num: int):
    lengths = np.array(costs, np.int64)
    plans = shares(lengths, 600, num)
    assert len(plans) == num
    assert len({len(own) for own in plans}) == 1
    passed = [int(i) for own in plans for rows in own for i in rows]
    assert sorted(passed) == list(range(len(costs)))
    assert [[r.tolist() for r in own] for own in shares(lengths, 600, num)] == [
        [r.tolist() for r in own] for own in plans
    ]


@given(st.lists(st.integers(1, 500), min_size=8, max_size=60))
def test_parts_differ_by_less_than_the_longest_sequence(costs: list[int]):
    sums = [sum(costs[i] for i in part) for part in balanced(costs, 2)]
    assert abs(sums[0] - sums[1]) <= max(costs)
