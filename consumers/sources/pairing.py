"""Which two members of a group become a pair: what was rewarded best, and what worst. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from .members import Member


def beside_pair(members: Iterable[Member]) -> Iterator[tuple[Member, str]]:
    """The members that take no part in their group's pair, and why.

    The best-rewarded member is preferred to the worst, of equals that in the lowest slot. A
    group whose rewards do not differ prefers nothing, so no member is left.
    """
    ranked: list[Member] = []
    for m in members:
        if math.isfinite(m.reward):
            ranked.append(m)
        else:
            yield m, f"reward {m.reward} prefers nothing"
    ranked.sort(key=wanted_first)
    best, worst = (ranked[0].reward, ranked[-1].reward) if ranked else (0.0, 0.0)
    lowest = next((m for m in ranked if m.reward == worst), None)
    for m in ranked:
        if best == worst:
            yield m, f"no pair: every reward of the group is {best:g}"
        elif m is not ranked[0] and m is not lowest:
            yield (
                m,
                f"reward {m.reward:g} is in no pair: the best {best:g} and the worst {worst:g} are",
            )


def wanted_first(member: Member) -> tuple[float, int, str]:
    """Order of a pair: the preferred one, then the other."""
    return -member.reward, member.slot, member.trajectory_id
