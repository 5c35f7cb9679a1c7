"""Where pieces lie in their tensor: against torch's own arithmetic, and by hand."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from streamrft.consumers.convert.boxes import Box, Split, hole, runs, shard_box, whole
from streamrft.consumers.convert.shards import _place
from streamrft.consumers.convert.unpickle import Inert

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple), st.data())
@settings(max_examples=60)
def test_a_ranks_box_is_the_one_that_torch_gives_it(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    boxes = set()
    for place in product(*(range(n) for n in mesh)):
        box = shard_box(shape, mesh, place, [Split(d) for d in dims])
        sizes, start = _compute_local_shape_and_global_offset(
            shape, mesh, lambda m, place=place: place[m], placements
        )
        assert box.shape == tuple(sizes)
        assert not box.numel or box.start == tuple(start)
        boxes.add(box)
    assert hole(boxes, shape) == ""


def test_a_strided_shard_is_cut_after_the_dimension_to_its_right() -> None:
    splits = [Split(0, inside=True), Split(0)]
    found = [shard_box((8,), (2, 2), (f, t), splits).start[0] for f in (0, 1) for t in (0, 1)]
    assert found == [0, 4, 2, 6]


@given(SHAPES, st.data())
@settings(max_examples=60)
def test_runs_put_a_box_where_slicing_would(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    piece = torch.arange(1, math.prod(size) + 1).reshape(size)
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = piece
    found = torch.zeros(math.prod(shape), dtype=torch.int64)
    for at, inside, length in runs(Box(start, size), shape):
        found[at : at + length] = piece.reshape(-1)[inside : inside + length]
    assert torch.equal(found.reshape(shape), expected)


def test_whole_rows_are_one_run() -> None:
    assert list(runs(Box((2, 0), (3, 5)), (9, 5))) == [(10, 0, 15)]
    assert list(runs(whole(()), ())) == [(0, 0, 1)]


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([Box((0, 0), (2, 3)), Box((2, 0), (2, 3))], ""),
        ([Box((0, 0), (2, 3))], "6 of 12 elements are there"),
        ([Box((0, 0), (2, 3)), Box((1, 0), (2, 3))], "two pieces meet at (1, 0)"),
        ([Box((0, 0), (4, 4))], "a piece reaches from (0, 0) to (4, 4)"),
        ([Box((0, 0), (4, 1)), Box((0, 1), (4, 2))], ""),
        ([Box((0, 0), (4, 2)), Box((0, 1), (4, 1))], "two pieces meet at (0, 1)"),
    ],
)
def test_a_hole_or_an_overlap_is_told(boxes: list[Box], why: str) -> None:
    assert hole(boxes, (4, 3)) == why


def mesh(**kept: Any) -> Inert:
    made = Inert()
    made.__setstate__(kept)
    return made


@pytest.mark.parametrize(
    "kept",
    [
        {"mesh": torch.arange(6).reshape(2, 3)},
        {"_mesh": torch.arange(6).reshape(2, 3)},
        {"_layout": SimpleNamespace(shape=(2, 3), stride=(3, 1))},
        {
            "_layout": SimpleNamespace(
                axes=(
                    SimpleNamespace(shape=(2,), stride=(3,)),
                    SimpleNamespace(shape=(3,), stride=(1,)),
                )
            )
        },
    ],
    ids=["tensor", "hidden tensor", "one layout", "an axis each"],
)
def test_every_way_to_keep_a_mesh_gives_the_ranks_place(kept: dict[str, Any]) -> None:
    assert [_place(mesh(**kept), rank, "here") for rank in (0, 2, 3, 5)] == [
        ((2, 3), (0, 0)), ((2, 3), (0, 2)), ((2, 3), (1, 0)), ((2, 3), (1, 2)),
    ]  # fmt: skip
