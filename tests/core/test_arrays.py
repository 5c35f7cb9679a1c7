"""Packed arrays say on every machine what was put in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.schemas import arrays
from streamrft.schemas.errors import InvalidEvent

INT32 = st.integers(-(2**31), 2**31 - 1)


def test_bytes_are_little_endian_whatever_the_machine():
    assert arrays.pack_ints([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert arrays.pack_floats([1.0]) == b"\x00\x00\x80\x3f"
    assert arrays.pack_mask([True, False]) == b"\x01\x00"
    assert arrays.pack_ints(np.array([1], dtype=">i8")) == b"\x01\x00\x00\x00"


@given(st.lists(INT32))
def test_ints_come_back(values):
    assert arrays.ints(arrays.pack_ints(values)).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_come_back_bit_for_bit(values):
    assert arrays.floats(arrays.pack_floats(values)).tolist() == values


def test_unpacking_copies_nothing():
    packed = arrays.pack_ints(range(1000))
    assert np.shares_memory(arrays.ints(packed), np.frombuffer(packed, np.uint8))


@given(st.lists(st.integers(0, 3)))
def test_runs_come_back_and_no_two_neighbours_are_equal(values):
    packed = arrays.pack_runs(values)
    assert arrays.unpack_runs(packed).tolist() == values
    runs = [value for value, _ in arrays.run_pairs(packed)]
    assert all(a != b for a, b in zip(runs, runs[1:], strict=False))
    assert arrays.runs(packed).tolist() == [list(p) for p in arrays.run_pairs(packed)]


def test_bounds_of_runs_span_all_sequences():
    assert arrays.run_bounds([arrays.pack_runs([4, 4, 7]), arrays.pack_runs([5])]) == (4, 7)
    assert arrays.run_bounds([b"", b""]) == (-1, -1)


@given(st.lists(st.floats(width=32)))
def test_all_finite_agrees_with_python(values):
    expected = all(abs(v) != float("inf") and v == v for v in values)
    assert arrays.all_finite(arrays.pack_floats(values)) is expected


@pytest.mark.parametrize("unpack", [arrays.ints, arrays.floats, arrays.runs, arrays.all_finite])
def test_bytes_that_are_no_whole_values_are_refused(unpack):
    with pytest.raises(InvalidEvent, match="5 bytes are no"):
        unpack(b"\x00" * 5)
