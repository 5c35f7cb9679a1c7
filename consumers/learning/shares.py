"""Which rank passes which sequences: shares of equal cost, and as many micro-batches for each."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from .batches import Indices, plan

_NOTHING: Indices = np.zeros(0, np.int64)


def balanced(costs: Sequence[int] | Indices, num_parts: int) -> list[Indices]:
    """Indices of `costs` in `num_parts` parts whose sums are near each other, each part rising.

    A function of the costs alone. Every part may be empty. Source: the differencing method of
    Karmarkar and Karp, 1982: the two most uneven partial solutions are laid on each other, the
    largest sum of one on the smallest of the other.
    """
    ties = itertools.count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, cost in enumerate(costs):
        solution = [(int(cost), [i]), *((0, list[int]()) for _ in range(num_parts - 1))]
        heapq.heappush(heap, (-int(cost), next(ties), solution))
    while len(heap) > 1:
        (_, _, one), (_, _, two) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(two), strict=True)
        merged = sorted(((a + b, i + j) for (a, i), (b, j) in pairs), reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ties), merged))
    parts = heap[0][2] if heap else [(0, list[int]())] * num_parts
    return [np.array(sorted(indices), np.int64) for _, indices in parts]


def shares(lengths: Indices, budget: int, num_ranks: int) -> list[list[Indices]]:
    """The micro-batches of every rank, as `plan` cuts them: indices into `lengths`.

    Ranks that shard one model pass it together, so whoever has fewer gets empty ones at the end.
    """
    parts = balanced(lengths, num_ranks)
    plans = [[part[rows] for rows in plan(lengths[part], budget)] for part in parts]
    most = max(map(len, plans))
    return [own + [_NOTHING] * (most - len(own)) for own in plans]
