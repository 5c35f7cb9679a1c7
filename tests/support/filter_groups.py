"""Joined groups for tests of filters and priorities."""

from __future__ import annotations

from collections.abc import Sequence

from join_scripts import sequence, traj

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.streams.filters import Candidate, Filter, JoinedGroup
from streamrft.streams.payloads import Payload


def member(
    slot: int, reward: float, *, sequences: Sequence[ev.Sequence] = (), **stats
) -> Candidate:
    """A scored member; `stats` are metrics of its rollout."""
    t = traj(f"g:{slot}:a", size=99, sequences=list(sequences) or [sequence()], metrics=stats)
    payload = Payload.of(codec.encode(t), t)
    return Candidate(slot, t.trajectory_id, reward, {"judge": reward}, dict(stats), payload)


def joined(*members: Candidate) -> JoinedGroup:
    return JoinedGroup("g", 7, len(members), list(members), list(members))


def rejected(step: Filter, *members: Candidate) -> dict[int, str]:
    """Slot -> numbers of everyone that a filter rejects."""
    return {r.slot: r.detail for r in step.apply(joined(*members))}
