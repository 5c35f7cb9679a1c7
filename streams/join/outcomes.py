"""What the join decides; the pipeline and the shell turn it into events."""

from __future__ import annotations

import msgspec

from ...schemas.events import DropReason, Reward


class JoinedMember(msgspec.Struct, gc=False):
    """A scored member. `parts` is the value by source, `reward` their weighted sum.

    `spans`: (sequence, start, end, weighted value) for every score about a range of tokens.
    """

    slot: int
    trajectory_id: str
    offset: int
    reward: float
    parts: dict[str, float]
    spans: list[tuple[int, int, int, float]]


class Dropped(msgspec.Struct, gc=False):
    """A trajectory that ended without training."""

    trajectory_id: str
    group_id: str
    slot: int
    number: int
    reason: DropReason
    detail: str


class Closed(msgspec.Struct, gc=False):
    """A group that was closed (revision 0), or amended after its close (revision 1 and up).

    `drops` are decided by this close: each will say how many experiences the group emitted.
    """

    group_id: str
    number: int
    size: int
    revision: int
    members: list[JoinedMember]
    drops: list[Dropped]


class Misaddressed(msgspec.Struct, gc=False):
    """A reward that lies on another partition than its group; to be sent on."""

    reward: Reward
    group_id: str


Outcome = Closed | Dropped | Misaddressed
