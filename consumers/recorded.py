"""What the log says of earlier training: branches, checkpoints, recorded cuts, finished steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..schemas import codec
from ..schemas.errors import ConfigError
from ..schemas.events import Branch, Checkpoint, Cut, Event, TrainStep
from ..schemas.topics import CATALOGUE, Topics
from ..streams.lineage import MAIN, Lineage, surviving_branch
from ..streams.log import Log
from ..streams.reading import begins, read_to_end

logger = logging.getLogger("streamrft")


@dataclass
class History:
    """The fold of `checkpoints` and `train_steps`, in log order. Pure."""

    branches: list[Branch] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    cuts: dict[tuple[str, int], Cut] = field(default_factory=dict)
    steps: set[tuple[str, int]] = field(default_factory=set)

    def add(self, event: Event) -> None:
        """Fold one event. Of two cuts of one step, which fencing excludes, the first stands."""
        if isinstance(event, Branch):
            self.branches.append(event)
        elif isinstance(event, Checkpoint):
            self.checkpoints.append(event)
        elif isinstance(event, TrainStep):
            self.steps.add((event.branch, event.step))
        elif isinstance(event, Cut):
            first = self.cuts.setdefault((event.branch, event.step), event)
            if first is not event:
                logger.error("step %d of branch %s was cut twice", event.step, event.branch)

    def lineage(self, branch: str) -> Lineage:
        """The lineage of a branch. Raises LogError for one that nobody announced."""
        return Lineage.of(branch, self.branches)

    def forks_of(self, branch: str) -> set[int]:
        """Steps at which other branches began."""
        return {b.step for b in self.branches if b.parent == branch}

    def recorded_cut(self, lineage: Lineage, step: int) -> Cut | None:
        """The cut of a step of this lineage, if it was made."""
        found = (c for (b, s), c in self.cuts.items() if s == step and lineage.contains(b, s))
        return next(found, None)

    def is_done(self, lineage: Lineage, step: int) -> bool:
        """Whether the step's TrainStep is on the log."""
        return any(s == step and lineage.contains(b, s) for b, s in self.steps)

    def announced(self, lineage: Lineage) -> dict[int, Checkpoint]:
        """The first announcement of each version of this lineage; its bytes stand."""
        found: dict[int, Checkpoint] = {}
        for c in self.checkpoints:
            if lineage.contains(c.branch, c.step):
                found.setdefault(c.step, c)
        return found


@dataclass(frozen=True)
class Place:
    """Where training goes on. `fork`: the Branch event to publish first, or None."""

    branch: str
    fork: Branch | None = None


def choose_branch(
    history: History, resume_from: str | None, branch: str | None, now_ms: int
) -> Place:
    """The branch to train: the surviving one, or the fork that the configuration asks for.

    A fork that is on the log already is continued; if it is not the surviving branch its event is
    repeated, since the newest event names the branch that everybody follows.

    Raises:
        ConfigError: `resume_from` is no checkpoint folder of this run, or `branch` a wrong name.
    """
    surviving = surviving_branch(history.branches)
    if resume_from is None:
        return Place(surviving)
    parent, step = _named_checkpoint(resume_from)
    name = branch or f"{parent}.{step}"
    known = next((b for b in history.branches if b.branch == name), None)
    if known is None:
        if name in (parent, MAIN):
            raise ConfigError(
                f"branch: {name!r} is the branch that global_step_{step} lies on; name another, or "
                f"leave branch out for {parent}.{step}."
            )
        return Place(name, Branch(branch=name, parent=parent, step=step, produced_at=now_ms))
    if (known.parent, known.step) != (parent, step):
        raise ConfigError(
            f"branch: {name!r} began at global_step_{known.step} of {known.parent}, not at "
            f"{resume_from}. Name another branch."
        )
    again = Branch(branch=name, parent=parent, step=step, produced_at=now_ms)
    return Place(name, None if name == surviving else again)


def _named_checkpoint(resume_from: str) -> tuple[str, int]:
    """`global_step_90` -> ("main", 90); `try2/global_step_90` -> ("try2", 90)."""
    branch, _, folder = resume_from.rstrip("/").rpartition("/")
    step = folder.removeprefix("global_step_")
    if not step.isdecimal() or step == folder or "/" in branch:
        raise ConfigError(
            f"resume_from: {resume_from!r} is no checkpoint of this run; write global_step_<N>, or "
            "<branch>/global_step_<N> for one of another branch."
        )
    return branch or MAIN, int(step)


def read_history(log: Log, topics: Topics) -> History:
    """Read both topics to their ends. Call it under the lease, so that they grow no more.

    Raises:
        UndecodableRecord, InvalidEvent: one of them is no event; to go on without it might train
            a step twice.
    """
    history = History()
    for topic in ("checkpoints", "train_steps"):
        for record in read_to_end(log, begins(log, topics.name(topic))):
            history.add(codec.decode(record.value, *CATALOGUE[topic].carries))
    return history
