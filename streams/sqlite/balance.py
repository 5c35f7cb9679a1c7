"""How the members of a consumer group share its partitions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def balance(holders: Mapping[int, int | None], members: Sequence[int]) -> dict[int, int]:
    """Who shall have each share: numbers even within one, as few shares as possible moved.

    Args:
        holders: the present holder of every share, None or no member when it is free.
        members: member ids in order of their names.
    """
    held = {m: [s for s in sorted(holders) if holders[s] == m] for m in members}
    by_load = sorted(members, key=lambda m: -len(held[m]))
    least, num_larger = divmod(len(holders), len(members))
    quota = {m: least + (rank < num_larger) for rank, m in enumerate(by_load)}
    target = {s: m for m in members for s in held[m][: quota[m]]}
    free = [s for s in sorted(holders) if s not in target]
    for m in members:
        num_kept = min(len(held[m]), quota[m])
        for s in free[: quota[m] - num_kept]:
            target[s] = m
        free = free[quota[m] - num_kept :]
    return target
