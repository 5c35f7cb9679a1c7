"""Read a stage's topics into the ledger, upstream facts first, and keep the fold beside the log.

Order matters while the run goes on: the ends of `trajectories` and the join's positions are fixed
first, then its state, then what it wrote, and the trajectories last. What moves meanwhile is then
seen either where it was or where it went, never nowhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ...schemas import events as ev
from ...schemas.topics import CATALOGUE
from ...streams.join.state import LIVE, decode_group
from ...streams.lineage import surviving_lineage
from ...streams.log import Log, Partition, Record
from ...streams.outbox import read_state
from ...streams.reading import begins, committed, drain, event_in, read_events, read_to_end
from ..plan import Stage
from .ledger import Balance, Books, Ledger

logger = logging.getLogger("streamrft")

_FORMAT = 2
_REWARD_OUTCOMES = (
    "applied",
    "duplicate",
    "late",
    "orphan",
    "superseded",
    "refused",
    "forwarded",
    "early",
)


class Kept(msgspec.Struct):
    """The file beside the log: the books and how far each topic was read."""

    format: int
    namespace: str
    born_ms: int
    positions: dict[str, dict[int, int]]
    books: Books


class Counting:
    """Brings the books of one stage up to date. Owned by one thread; `update` may be repeated."""

    def __init__(self, log: Log, stage: Stage, *, anew: bool = False) -> None:
        """Start from the kept fold, unless `anew` or it does not belong to this log."""
        self._log, self._stage, self._topics = log, stage, stage.topics
        saved = read_events(log, stage.topics, "checkpoints")
        self.lineage = surviving_lineage([e for e in saved if isinstance(e, ev.Branch)])
        self._path = stage.job_dir / "ledger.msgpack"
        self._born_ms = self._birth()
        kept = None if anew else self._load()
        self._positions = kept.positions if kept else {}
        self._ledger = Ledger(self.lineage, kept.books if kept else None)

    def update(self) -> Balance:
        """Read what is new, judge it and keep the fold."""
        trajectories = self._topics.name("trajectories")
        info = self._log.describe([trajectories])[trajectories]
        forked = len(self.lineage.segments) > 1
        finished = {} if forked else self._finished()
        joined, in_state, rewards = self._join_state()
        self._read("dead_letters", self._on_dead_letter)
        self._read("experiences", self._on_experience)
        self._read("drops", self._on_drop)
        self._read("train_steps", self._on_train_step)
        # a cut may name an experience that was written after the topic's end was read above
        self._read("experiences", self._on_experience)
        self._read("trajectories", self._on_trajectory)
        self._read("dead_letters", self._on_dead_letter)
        self._save()
        return self._ledger.balance(joined, in_state, info.begin, rewards, finished)

    def _finished(self) -> dict[int, int]:
        """Offsets of `experiences` below which all have their end, as the trainer committed."""
        name = self._topics.name("experiences")
        places = [Partition(name, p) for p in range(self._topics.num_partitions)]
        found = committed(self._log, f"{self._topics.namespace}.trainer", places)
        return {p.partition: found.get(p, 0) for p in places}

    def _join_state(self) -> tuple[dict[int, int], set[str], dict[str, int]]:
        """The join's next offsets of `trajectories`, ids it holds without an end, and rewards."""
        joined: dict[int, int] = {}
        pending: set[str] = set()
        counts: dict[str, int] = {name: 0 for name in _REWARD_OUTCOMES}
        for partition in range(self._topics.num_partitions):
            state = read_state(self._log, self._topics, partition)
            joined[partition] = state.positions.get("trajectories", 0)
            for name in counts:
                counts[name] += state.counters.get(name, 0)
            for value in state.groups:
                group = decode_group(value)
                if not group.is_open:
                    continue
                pending |= {
                    ev.trajectory_id(group.group_id, slot, group.holders[slot])
                    for slot, member in group.members.items()
                    if member.state == LIVE or slot == group.withheld
                }
        return joined, pending, counts

    def _read(self, topic: str, take: Callable[[Record], None]) -> None:
        """Give `take` every record since the last call, to the end as it is now."""
        name = self._topics.name(topic)
        info = self._log.describe([name])[name]
        at = self._positions.setdefault(topic, {})
        for p, first in info.begin.items():
            if first > at.get(p, 0):
                self._ledger.on_missed(topic, p)
        places = {
            Partition(name, p): max(at.get(p, 0), first)
            for p, first in info.begin.items()
            if max(at.get(p, 0), first) < info.end[p]
        }
        if not places:
            return
        consumer = self._log.consumer()
        consumer.assign(places)
        for record in drain(self._log, consumer):
            if record.value is not None:
                take(record)
        at |= {p.partition: offset for p, offset in consumer.positions().items()}
        consumer.close()

    def _on_trajectory(self, record: Record) -> None:
        found = event_in(record, ev.Trajectory)
        if found is None:
            self._ledger.on_unreadable(record.position)
        else:
            self._ledger.on_trajectory(found.trajectory_id, record.position)

    def _on_experience(self, record: Record) -> None:
        if (found := event_in(record, ev.Experience)) is not None:
            self._ledger.on_experience(found, record.offset)

    def _on_drop(self, record: Record) -> None:
        if (found := event_in(record, ev.Drop)) is not None:
            self._ledger.on_drop(found)

    def _on_train_step(self, record: Record) -> None:
        found = event_in(record, *CATALOGUE["train_steps"].carries)
        if isinstance(found, ev.Cut):
            self._ledger.on_cut(found)

    def _on_dead_letter(self, record: Record) -> None:
        if (found := event_in(record, ev.DeadLetter)) is not None:
            of_trajectories = self._topics.short(found.topic) == "trajectories"
            self._ledger.on_dead_letter(found, of_trajectories=of_trajectories)

    def _birth(self) -> int:
        """Time of the stage's first checkpoint record: another log of the same name differs."""
        name = self._topics.name("checkpoints")
        first = next(read_to_end(self._log, begins(self._log, name)), None)
        return first.timestamp_ms if first else 0

    def _load(self) -> Kept | None:
        """The kept fold, when it is of this log, branch and format, and no longer than the log."""
        try:
            kept = msgspec.msgpack.decode(self._path.read_bytes(), type=Kept)
        except (OSError, msgspec.DecodeError):
            return None
        mine = (_FORMAT, self._stage.namespace, self._born_ms, self.lineage.branch)
        if (kept.format, kept.namespace, kept.born_ms, kept.books.branch) != mine:
            return None
        for topic, at in kept.positions.items():
            name = self._topics.name(topic)
            ends = self._log.describe([name])[name].end
            if any(offset > ends.get(p, 0) for p, offset in at.items()):
                return None
        return kept

    def _save(self) -> None:
        """Keep the fold, where there is room for it; a count anew costs only time."""
        kept = Kept(
            _FORMAT, self._stage.namespace, self._born_ms, self._positions, self._ledger.books
        )
        partial = Path(f"{self._path}.{os.getpid()}")
        try:
            partial.write_bytes(msgspec.msgpack.encode(kept))
            partial.replace(self._path)
        except OSError as error:
            logger.info("the count is not kept: %s", error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
