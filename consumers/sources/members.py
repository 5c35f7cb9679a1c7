"""What waits for a batch, and the rules by which batches are made. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...schemas.events import CutMember, Experience


class Lineage(Protocol):
    """The steps that led to the current branch."""

    def contains(self, branch: str, step: int) -> bool:
        """Whether step `step` of `branch` belongs to it."""
        ...


@dataclass(frozen=True)
class BatchRules:
    """What a batch is made of.

    Args:
        batch_groups: groups a batch.
        max_staleness: highest (steps done - min_policy_version); None allows any.
        source_max_staleness: the same by reward source; the laxest that applies counts.
        in_number_order: take groups in publication order without gaps (deterministic runs).
        ends_by_steps: the number of steps ends the run, so an Ended makes no short last batch;
            one may be left from before the number was raised.
        in_pairs: of each group the best- and the worst-rewarded member are trained, in that order.
    """

    batch_groups: int
    max_staleness: int | None = None
    source_max_staleness: Mapping[str, int | None] = field(default_factory=dict)
    in_number_order: bool = False
    ends_by_steps: bool = False
    in_pairs: bool = False

    def limit(self, sources: Iterable[str]) -> int | None:
        """The staleness allowed for an experience scored by `sources`; None when any is."""
        limits = [self.max_staleness]
        limits += [self.source_max_staleness[s] for s in sources if s in self.source_max_staleness]
        numbers = [limit for limit in limits if limit is not None]
        return max(numbers) if len(numbers) == len(limits) else None


@dataclass(frozen=True)
class Member:
    """One experience that waits for its batch."""

    trajectory_id: str
    group_id: str
    slot: int
    number: int
    branch: str
    min_policy_version: int
    max_policy_version: int
    num_tokens: int
    reward: float
    priority: float
    sources: tuple[str, ...]
    partition: int
    offset: int
    group_experiences: int

    def as_cut_member(self) -> CutMember:
        """How a Cut names it. Only revision 0 is trained online."""
        return CutMember(
            trajectory_id=self.trajectory_id,
            reward_revision=0,
            partition=self.partition,
            offset=self.offset,
        )


def member_of(e: Experience, partition: int, offset: int) -> Member:
    """What is remembered of an experience that lies at (partition, offset)."""
    return Member(
        trajectory_id=e.trajectory_id,
        group_id=e.group_id,
        slot=e.slot,
        number=e.number,
        branch=e.branch,
        min_policy_version=e.min_policy_version,
        max_policy_version=e.max_policy_version,
        num_tokens=e.num_tokens,
        reward=e.reward,
        priority=e.priority,
        sources=tuple(e.reward_parts),
        partition=partition,
        offset=offset,
        group_experiences=e.group_experiences,
    )
