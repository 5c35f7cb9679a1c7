"""`streamrft explain ID`: the path of a trajectory, group, reward or checkpoint, from the log."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...schemas import events as ev
from ...schemas.errors import StreamrftError
from ...schemas.topics import CATALOGUE, key_of, partition_for
from ...streams.join.state import Group, decode_group
from ...streams.lineage import Lineage, surviving_branch
from ...streams.log import Partition, Record
from ...streams.outbox import read_state
from ...streams.reading import begins, event_in, read_to_end
from .place import Place, opened
from .sentences import sentence

_CHECKPOINT = re.compile(r"(?:.*?([^/]+)/)?global_step_(\d+)/?\Z")
_BY_GROUP = ("tasks", "trajectories", "rewards", "experiences", "drops")


@dataclass(frozen=True)
class Found:
    """An event and where it lies; `topic` by its catalogue name."""

    topic: str
    record: Record
    event: ev.Event


def command(args: argparse.Namespace) -> int:
    """Print the path of one id."""
    with opened(args.config, args.stage) as place:
        for line in explain(place, args.id):
            print(line)
    return 0


def explain(place: Place, wanted: str) -> list[str]:
    """The lines that tell an id's path, in the order in which things happened.

    Raises:
        StreamrftError: nothing on the log has this id.
    """
    match = _CHECKPOINT.match(wanted)
    if match:
        return _Checkpoints(place).lines(match[1], int(match[2]))
    group_id = ev.group_of(wanted)
    found = _of_group(place, group_id)
    if group_id != wanted and found:
        mine = [f for f in found if _is_about(f.event, wanted)]
        if any(not isinstance(f.event, ev.Task) for f in mine):
            return _path(place, wanted, mine, group_id)
    if found := _of_group(place, wanted):
        return _path(place, wanted, found, wanted)
    reward = _reward(place, wanted)
    if reward is not None:
        assert isinstance(reward.event, ev.Reward)
        return [_line(reward), "", *explain(place, reward.event.trajectory_id)]
    raise StreamrftError(
        f"{wanted}: no task, trajectory, reward or checkpoint of {place.stage.namespace} has this "
        "id. Trajectories are <taskset>.<n>:<slot>:<attempt>, groups <taskset>.<n>, checkpoints "
        "global_step_N; `streamrft tail trajectories` lists ids."
    )


def _path(place: Place, wanted: str, found: list[Found], group_id: str) -> list[str]:
    steps = _training_of(place, {wanted} if wanted != group_id else _ids(found))
    everything = sorted(found + steps, key=lambda f: (f.record.timestamp_ms, f.topic))
    lines = [wanted]
    if everything:
        began = everything[0].record.timestamp_ms
        lines += [_line(f, began) for f in everything]
    ids = [wanted] if wanted != group_id else sorted(_ids(found))
    group = _open_group(place, group_id)
    lines.append("")
    lines += [
        f"  {trajectory_id}: {_state(trajectory_id, everything, group)}" for trajectory_id in ids
    ]
    if not ids:
        lines.append(f"  {wanted}: not rolled out yet")
    return lines


def _of_group(place: Place, group_id: str) -> list[Found]:
    """Every event under the group's key; rewards without a key are looked at too."""
    found: list[Found] = []
    for topic in _BY_GROUP:
        partition = partition_for(group_id.encode(), place.stage.topics.partitions(topic))
        for f in _read(place, topic, partition, lambda r: r.key in (None, group_id.encode())):
            if key_of(f.event, topic) == group_id.encode():
                found.append(f)
    return found


def _reward(place: Place, event_id: str) -> Found | None:
    for partition in range(place.stage.topics.partitions("rewards")):
        for found in _read(place, "rewards", partition):
            if isinstance(found.event, ev.Reward) and found.event.event_id == event_id:
                return found
    return None


def _training_of(place: Place, ids: set[str]) -> list[Found]:
    """Cuts with one of the ids, their steps, and the first checkpoint after each."""
    steps = list(_read(place, "train_steps", 0))
    cuts = [
        f
        for f in steps
        if isinstance(f.event, ev.Cut) and ids & {m.trajectory_id for m in f.event.members}
    ]
    at = {(c.event.branch, c.event.step) for c in cuts if isinstance(c.event, ev.Cut)}
    done = [
        f
        for f in steps
        if isinstance(f.event, ev.TrainStep) and (f.event.branch, f.event.step) in at
    ]
    saved = [f for f in _read(place, "checkpoints", 0) if isinstance(f.event, ev.Checkpoint)]
    return cuts + done + [f for f in _first_after(saved, at)]


def _first_after(saved: list[Found], at: set[tuple[str, int]]) -> Iterator[Found]:
    for branch, step in sorted(at):
        later = [
            f
            for f in saved
            if isinstance(f.event, ev.Checkpoint)
            and f.event.branch == branch
            and f.event.step >= step
        ]
        if later:
            yield min(
                later, key=lambda f: f.event.step if isinstance(f.event, ev.Checkpoint) else 0
            )


def _state(trajectory_id: str, found: list[Found], group: Group | None) -> str:
    """The final state in words, or what is waited for."""
    cuts = [f.event for f in found if isinstance(f.event, ev.Cut)]
    for cut in cuts:
        if trajectory_id in {m.trajectory_id for m in cut.members}:
            return f"trained by step {cut.step} of branch {cut.branch}"
    drops = [f.event for f in found if isinstance(f.event, ev.Drop)]
    for drop in drops:
        if drop.trajectory_id == trajectory_id:
            return f"{drop.reason}, decided by {drop.where}: {drop.detail}"
    mine = [f for f in found if _is_about(f.event, trajectory_id)]
    if any(isinstance(f.event, ev.Experience) for f in mine):
        return "pending: an experience, not yet taken by the trainer"
    if not any(isinstance(f.event, ev.Trajectory) for f in mine):
        return "no trajectory of this id is on the log; what came for it waits for it"
    if group is not None and group.is_open:
        return f"pending: {_waits(trajectory_id, group)}"
    return "pending: not yet read by the join"


def _waits(trajectory_id: str, group: Group) -> str:
    slot = int(trajectory_id.split(":")[-2])
    member = group.members.get(slot)
    missing = sorted(member.missing) if member else []
    if member and missing:
        until = ""
        if member.deadline_ms is not None:
            until = f" until {_clock(member.deadline_ms)}"
        return f"waits for rewards of {', '.join(missing)}{until}"
    return f"scored; its group waits ({len(group.members)} of {group.size} slots filled, " + (
        f"{group.num_waiting} unscored)"
    )


def _open_group(place: Place, group_id: str) -> Group | None:
    topics = place.stage.topics
    partition = partition_for(group_id.encode(), topics.num_partitions)
    for value in read_state(place.log, topics, partition).groups:
        group = decode_group(value)
        if group.group_id == group_id:
            return group
    return None


class _Checkpoints:
    """What made a checkpoint: the cuts since the full checkpoint before it, on its lineage."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._saved = list(_read(place, "checkpoints", 0))
        self._branches = [f.event for f in self._saved if isinstance(f.event, ev.Branch)]

    def lines(self, branch: str | None, step: int) -> list[str]:
        """Its events, its parent and its cuts.

        Raises:
            StreamrftError: no such checkpoint on the log.
        """
        known = {"main", *(b.branch for b in self._branches)}
        branch = branch if branch in known else surviving_branch(self._branches)
        lineage = Lineage.of(branch, self._branches)
        mine = [f for f in self._of(lineage) if self._step(f) == step]
        if not mine:
            steps = ", ".join(str(s) for s in sorted({self._step(f) for f in self._of(lineage)}))
            raise StreamrftError(
                f"global_step_{step}: no checkpoint of that step on branch {branch}; there are "
                f"{steps or 'none'}."
            )
        lines = [f"checkpoint global_step_{step} of branch {branch}", *map(_line, mine), ""]
        return [*lines, *self._history(lineage, step)]

    def _history(self, lineage: Lineage, step: int) -> list[str]:
        before = max((self._step(f) for f in self._of(lineage) if self._step(f) < step), default=0)
        cuts = [
            f
            for f in _read(self._place, "train_steps", 0)
            if isinstance(f.event, ev.Cut)
            and lineage.contains(f.event.branch, f.event.step)
            and f.event.step <= step
        ]
        ids = [
            m.trajectory_id for f in cuts if isinstance(f.event, ev.Cut) for m in f.event.members
        ]
        lines = [f"  all of its training: {len(cuts)} steps, {len(ids)} trajectories"]
        recent = [f for f in cuts if isinstance(f.event, ev.Cut) and f.event.step > before]
        if recent:
            lines.append(f"  since the checkpoint of step {before}:")
            lines += [_line(f) for f in recent]
            lines += [
                f"    {m.trajectory_id}"
                for f in recent
                if isinstance(f.event, ev.Cut)
                for m in f.event.members
            ]
        return lines

    def _of(self, lineage: Lineage) -> list[Found]:
        return [
            f
            for f in self._saved
            if isinstance(f.event, ev.Checkpoint) and lineage.contains(f.event.branch, f.event.step)
        ]

    @staticmethod
    def _step(found: Found) -> int:
        assert isinstance(found.event, ev.Checkpoint)
        return found.event.step


def _read(
    place: Place, topic: str, partition: int, wants: Callable[[Record], bool] = lambda record: True
) -> Iterator[Found]:
    source = Partition(place.stage.topics.name(topic), partition)
    start = {source: begins(place.log, source.topic)[source]}
    for record in filter(wants, read_to_end(place.log, start)):
        event = event_in(record, *CATALOGUE[topic].carries)
        if event is not None:
            yield Found(topic, record, event)


def _ids(found: list[Found]) -> set[str]:
    return {f.event.trajectory_id for f in found if isinstance(f.event, ev.Trajectory)}


def _is_about(event: ev.Event, trajectory_id: str) -> bool:
    if isinstance(event, ev.Task):
        return True
    return getattr(event, "trajectory_id", None) == trajectory_id


def _line(found: Found, began_ms: int | None = None) -> str:
    record = found.record
    where = f"{found.topic}[{record.partition}]@{record.offset}"
    when = _clock(record.timestamp_ms)
    if began_ms is not None:
        when += f" +{(record.timestamp_ms - began_ms) / 1000:.1f} s"
    return f"  {when:<22} {where:<20} {sentence(found.event)}"


def _clock(at_ms: int) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at_ms / 1000))
