"""Weights from stage to stage, and what of a stage is done, read from the log alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ..schemas import codec
from ..schemas import events as ev
from ..schemas.errors import InvalidEvent, LogError, UndecodableRecord, UnknownTopic
from ..schemas.topics import CATALOGUE, Topics
from ..streams.lineage import Lineage, surviving_branch
from ..streams.log import Log, Partition
from .plan import Stage, starting_from

E = TypeVar("E", bound=ev.Event)


def with_model(log: Log, stage: Stage) -> Stage:
    """The stage, its trainer starting from the last full checkpoint of the stage before.

    Raises:
        LogError: that stage has none yet.
    """
    before = _last_trained(stage.after)
    if before is None:
        return stage
    checkpoint = newest_full(log, before.topics)
    if checkpoint is None:
        raise LogError(
            f"stage {stage.name}: stage {before.name} has no full checkpoint on the log to start "
            f"from. Run it first: streamrft run, or streamrft train --stage {before.name}."
        )
    return starting_from(stage, f"{checkpoint.uri}/actor/huggingface")


def newest_full(log: Log, topics: Topics) -> ev.Checkpoint | None:
    """The full checkpoint with the most steps on the surviving branch; None before the first."""
    events = list(read_all(log, topics, "checkpoints"))
    branches = [e for e in events if isinstance(e, ev.Branch)]
    lineage = Lineage.of(surviving_branch(branches), branches)
    found = [
        e
        for e in events
        if isinstance(e, ev.Checkpoint) and e.kind == "full" and lineage.contains(e.branch, e.step)
    ]
    return max(found, key=lambda c: c.step, default=None)


def read_all(log: Log, topics: Topics, topic: str) -> Iterator[ev.Event]:
    """Every event of a topic of the catalogue, in order within a partition; none if it is missing.

    Records that are no events are left out: their readers dead-letter them.
    """
    name = topics.name(topic)
    try:
        info = log.describe([name])[name]
    except UnknownTopic:
        return
    consumer = log.consumer()
    consumer.assign({Partition(name, p): begin for p, begin in info.begin.items()})
    while records := consumer.poll(1000):
        for record in records:
            try:
                yield codec.decode(record.value or b"", *CATALOGUE[topic].carries)
            except (UndecodableRecord, InvalidEvent):
                continue
    consumer.close()


def _last_trained(stage: Stage | None) -> Stage | None:
    while stage is not None and stage.trainer is None:
        stage = stage.after
    return stage
