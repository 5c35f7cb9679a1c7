"""Which steps belong to a branch: its own, and its ancestors' up to each fork. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schemas.errors import LogError
from ..schemas.events import Branch

MAIN = "main"


@dataclass(frozen=True)
class Segment:
    """Steps of one branch that belong to a lineage; `last_step` None: all of them."""

    branch: str
    last_step: int | None


@dataclass(frozen=True)
class Lineage:
    """The steps of one branch and what it was forked from, the branch itself first."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, branch: str, branches: Iterable[Branch]) -> Lineage:
        """The lineage of `branch`, given the Branch events of the run.

        Raises:
            LogError: the branch, or a parent named by a Branch event, is neither `main` nor forked.
        """
        forks = {b.branch: b for b in branches}
        segments = [Segment(branch, None)]
        seen = {branch}
        while (fork := forks.get(branch)) is not None:
            if fork.parent in seen:
                raise LogError(f"branch {branch!r}: is its own ancestor by way of {fork.parent!r}")
            # a fork of a fork may lie before the point where its parent began
            segments.append(Segment(fork.parent, fork.step))
            branch = fork.parent
            seen.add(branch)
        if branch != MAIN:
            raise LogError(
                f"branch {branch!r}: no Branch event says where it begins. Known branches: "
                f"{', '.join(sorted({MAIN, *forks}))}."
            )
        return cls(_narrowed(segments))

    @property
    def branch(self) -> str:
        """The branch it is the lineage of."""
        return self.segments[0].branch

    @property
    def fork_step(self) -> int:
        """Last step that is not the branch's own; 0 for `main`."""
        return (self.segments[1].last_step or 0) if len(self.segments) > 1 else 0

    def contains(self, branch: str, step: int) -> bool:
        """Whether that step of that branch is part of this history."""
        last = self.last_step(branch)
        return branch == self.branch or (last is not None and step <= last)

    def last_step(self, branch: str) -> int | None:
        """Last step of an ancestor that belongs here; None for the branch itself and strangers."""
        return next((s.last_step for s in self.segments[1:] if s.branch == branch), None)


def _narrowed(segments: list[Segment]) -> tuple[Segment, ...]:
    """Each ancestor's end no later than the ends of the branches after it."""
    narrowed = segments[:1]
    limit: int | None = None
    for segment in segments[1:]:
        last = segment.last_step
        assert last is not None
        limit = last if limit is None else min(limit, last)
        narrowed.append(Segment(segment.branch, limit))
    return tuple(narrowed)


def surviving_branch(branches: Iterable[Branch]) -> str:
    """The branch that training is on: of the newest Branch event (in log order), else `main`."""
    newest = MAIN
    for fork in branches:
        newest = fork.branch
    return newest


def surviving_lineage(branches: Sequence[Branch]) -> Lineage:
    """The lineage of the branch that training is on. Raises LogError as `Lineage.of`."""
    return Lineage.of(surviving_branch(branches), branches)
