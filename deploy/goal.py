"""Whether a stage reached its goal, judged from the log alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..consumers.recorded import History, choose_branch
from ..consumers.settings import TrainerSettings
from ..schemas import events as ev
from ..schemas.errors import ConfigError
from ..streams.lineage import Lineage, surviving_lineage
from ..streams.log import Log, Partition
from ..streams.outbox import read_state
from ..streams.reading import begins, committed, read_events, read_to_end
from .plan import Stage

S = TypeVar("S", ev.Cut, ev.TrainStep, ev.Checkpoint)


@dataclass(frozen=True)
class Verdict:
    """`missing` says what is missing in words; empty when the goal is reached."""

    missing: str = ""

    @property
    def is_reached(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing


def judge(log: Log, stage: Stage) -> Verdict:
    """Whether a stage is done: all steps trained and the last one saved as a full checkpoint.

    An SFT stage that counts epochs cannot be judged before its trainer ended with 0: then the
    last step on the log is its last.
    """
    if stage.trainer is None:
        return _judge_exploring(log, stage)
    steps = list(read_events(log, stage.topics, "train_steps"))
    saved = list(read_events(log, stage.topics, "checkpoints"))
    branches = [e for e in saved if isinstance(e, ev.Branch)]
    lineage = surviving_lineage(branches)
    if wrong := _wrong_branch(stage.trainer, branches):
        return Verdict(wrong)
    done = max((s.step for s in _of(lineage, steps, ev.TrainStep)), default=0)
    cuts = _of(lineage, steps, ev.Cut)
    full = {c.step for c in _of(lineage, saved, ev.Checkpoint) if c.kind == "full"}
    wanted = stage.trainer.total_steps
    if wanted is not None and done < wanted:
        return Verdict(f"step {done} of {wanted} is the last on the log")
    if cuts and max(c.step for c in cuts) > done:
        return Verdict(f"the cut of step {max(c.step for c in cuts)} is not trained")
    if done not in full:
        return Verdict(f"step {done} has no full checkpoint on the log")
    if wanted is None and not stage.is_sft:
        return _judge_groups(log, stage, lineage, cuts)
    return Verdict()


def _wrong_branch(settings: TrainerSettings, branches: list[ev.Branch]) -> str:
    """Why the branch that training is on is not the one asked for; empty when it is."""
    try:
        place = choose_branch(History(branches=branches), settings.resume_from, settings.branch, 0)
    except ConfigError as error:
        return str(error)
    return f"branch {place.branch} is not the one that training is on" if place.fork else ""


def _judge_groups(log: Log, stage: Stage, lineage: Lineage, cuts: list[ev.Cut]) -> Verdict:
    """Every published group must be trained or dead."""
    tasks = read_events(log, stage.topics, "tasks")
    ended = [e for e in tasks if isinstance(e, ev.Ended) and e.branch == lineage.branch]
    if not ended:
        return Verdict("not all tasks are published (no Ended on the log)")
    trained = {ev.group_of(m.trajectory_id) for cut in cuts for m in cut.members}
    drops = (d for d in read_events(log, stage.topics, "drops") if isinstance(d, ev.Drop))
    dead = dead_groups(drops, lineage) - trained
    left = ended[-1].num_groups - len(trained) - len(dead)
    if left > 0:
        return Verdict(f"{left} of {ended[-1].num_groups} groups are neither trained nor dropped")
    return Verdict()


def all_failed(log: Log, stage: Stage) -> str:
    """What a stage that trained no step has instead, where every rollout failed; else empty."""
    if stage.trainer is None or stage.scheduler is None:
        return ""
    if any(isinstance(e, ev.TrainStep) for e in read_events(log, stage.topics, "train_steps")):
        return ""
    drops = [d for d in read_events(log, stage.topics, "drops") if isinstance(d, ev.Drop)]
    if not drops or any(d.reason != "failed" for d in drops):
        return ""
    return f"all {len(drops)} rollouts failed, the last because {drops[-1].detail}"


def dead_groups(drops: Iterable[ev.Drop], lineage: Lineage) -> set[str]:
    """Groups that emitted nothing, or whose emitted members the trainer all dropped.

    Off-lineage ones are left out, as they are from the number that an Ended says: whichever
    branch published a group, only its tokens decide that.
    """
    dead: set[str] = set()
    off: set[str] = set()
    slots: dict[str, set[int]] = {}
    for drop in drops:
        if drop.group_experiences == 0:
            dead.add(drop.group_id)
        elif drop.where == "trainer" and lineage.contains(drop.branch, drop.step):
            if drop.reason == "off_lineage":
                off.add(drop.group_id)
            found = slots.setdefault(drop.group_id, set())
            found.add(drop.slot)
            if drop.group_experiences and len(found) >= drop.group_experiences:
                dead.add(drop.group_id)
    return dead - off


def _judge_exploring(log: Log, stage: Stage) -> Verdict:
    """Explore mode: all tasks published, rolled out and joined as far as rewards are there."""
    tasks, trajectories = stage.topics.name("tasks"), stage.topics.name("trajectories")
    ended = [e for e in read_events(log, stage.topics, "tasks") if isinstance(e, ev.Ended)]
    if not ended:
        return Verdict("not all tasks are published (no Ended on the log)")
    starts = begins(log, tasks)
    if _has_unread(log, starts | committed(log, f"{stage.namespace}.explorers", starts)):
        return Verdict(f"records of {tasks} are not read by the explorers")
    if _has_unread(log, begins(log, trajectories) | _joined(log, stage)):
        return Verdict(f"records of {trajectories} are not read by the join")
    return Verdict()


def _joined(log: Log, stage: Stage) -> dict[Partition, int]:
    """Next offsets of `trajectories` that are a part of the join's state."""
    topics, found = stage.topics, {}
    for partition in range(topics.num_partitions):
        at = read_state(log, topics, partition).positions.get("trajectories")
        if at is not None:
            found[Partition(topics.name("trajectories"), partition)] = at
    return found


def _has_unread(log: Log, starts: Mapping[Partition, int]) -> bool:
    """Whether a record lies behind these positions, not just a hole."""
    ends = log.end_offsets(starts)
    left = {p: at for p, at in starts.items() if at < ends[p]}
    return bool(left) and next(read_to_end(log, left), None) is not None


def lag(log: Log, topic: str, group: str) -> int:
    """Offsets between a group's committed positions and the ends, holes included."""
    starts = begins(log, topic)
    at = starts | committed(log, group, starts)
    return sum(end - at[place] for place, end in log.end_offsets(starts).items())


def _of(lineage: Lineage, events: Iterable[ev.Event], kind: type[S]) -> list[S]:
    return [e for e in events if isinstance(e, kind) and lineage.contains(e.branch, e.step)]
