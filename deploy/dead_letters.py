"""Dead letters of one stage: chosen, and sent again to the topics that they came from.

A record sent again and the Replay event that says so are one transaction, so neither is without
the other, whenever the process is killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from ..schemas import codec
from ..schemas import events as ev
from ..schemas.errors import EventTooLarge, OffsetOutOfRange, StreamrftError, Timeout, UnknownTopic
from ..schemas.topics import CATALOGUE, Topics
from ..streams import faults
from ..streams.dead_letters import REPLAY_HEADER
from ..streams.log import Log, Partition, Position, Producer
from ..streams.reading import begins, event_in, read_to_end

_BATCH_RECORDS, _BATCH_BYTES = 100, 16 * 2**20
_VISIBLE_S = 10.0
# their readers take a record wherever it lies; elsewhere the order is part of what is said
REPLAYABLE = ("tasks", "trajectories", "rewards", "experiences")
_OF_ONE_TRAJECTORY = {"trajectories": ev.Trajectory, "experiences": ev.Experience}


@dataclass(frozen=True)
class Letter:
    """A dead letter; `id` is its offset. `num_replays`: how often it was sent again so far."""

    id: int
    event: ev.DeadLetter
    num_replays: int

    @property
    def again_from(self) -> int | None:
        """The letter whose replay this is, when a replayed record was refused again."""
        text = self.event.headers.get(REPLAY_HEADER, b"")
        return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class Selection:
    """Which letters; what is None or empty chooses all."""

    ids: frozenset[int] = frozenset()
    topic: str | None = None
    reader: str | None = None
    since_ms: int | None = None
    error: str | None = None

    def has(self, letter_id: int, letter: ev.DeadLetter, topics: Topics) -> bool:
        """Whether it is chosen."""
        return (
            (not self.ids or letter_id in self.ids)
            and self.topic in (None, letter.topic, topics.short(letter.topic))
            and self.reader in (None, letter.reader)
            and (self.since_ms is None or letter.produced_at >= self.since_ms)
            and (self.error is None or self.error.lower() in letter.error.lower())
        )


@dataclass(frozen=True)
class Sent:
    """What became of a letter that was to be sent again; `refused` says why it was not."""

    letter: Letter
    refused: str = ""


class DeadLetters:
    """The letters of one stage. Every question reads the topic anew, and keeps no values."""

    def __init__(self, log: Log, topics: Topics) -> None:
        self._log, self._topics = log, topics

    def letters(self, wanted: Selection) -> Iterator[Letter]:
        """The chosen ones in order.

        Raises:
            StreamrftError: an id that no letter has.
        """
        replays: Counter[int] = Counter()
        missing = set(wanted.ids)
        for offset, event in self._events():
            if isinstance(event, ev.Replay):
                replays[event.dead_letter] += 1
            else:
                missing.discard(offset)
        if missing:
            listed = ", ".join(map(str, sorted(missing)))
            raise StreamrftError(
                f"{listed}: no such dead letter; `streamrft dead-letters list` shows all there are"
            )
        for offset, event in self._events():
            if isinstance(event, ev.DeadLetter) and wanted.has(offset, event, self._topics):
                yield Letter(offset, event, replays[offset])

    def value_of(self, letter: Letter) -> bytes | None:
        """The record's value: the letter's own, or read at its position when it was left there.

        Raises:
            OffsetOutOfRange, UnknownTopic: it was left there and is gone.
        """
        event = letter.event
        if event.value is not None:
            return event.value
        (record,) = self._log.read_at([Position(event.topic, event.partition, event.offset)])
        return record.value

    def replay(self, wanted: Selection, *, again: bool = False) -> Iterator[Sent]:
        """Send the chosen letters again, those that were so before only with `again`.

        Every result is told after its transaction. Raises as `letters`, and Timeout when Kafka
        does not show in time that it was sent.
        """
        producer = self._log.producer()
        ended = self._ended_ids(wanted)
        chosen = (x for x in self.letters(wanted) if again or not x.num_replays)
        try:
            while batch := list(islice(chosen, _BATCH_RECORDS)):
                yield from self._send(producer, batch, ended)
        finally:
            producer.close()

    def _send(self, producer: Producer, batch: list[Letter], ended: set[str]) -> Iterator[Sent]:
        """One transaction, or several where the values are large."""
        while batch:
            size_bytes, results, before = 0, list[Sent](), self._end()
            with producer.transaction():
                while batch and size_bytes < _BATCH_BYTES:
                    letter = batch.pop(0)
                    try:
                        size_bytes += self._send_one(producer, letter, ended)
                        results.append(Sent(letter))
                    except (_Refused, OffsetOutOfRange, UnknownTopic, EventTooLarge) as error:
                        results.append(Sent(letter, str(error)))
                faults.reach("replay.before_commit")
            faults.reach("replay.committed")
            yield from results
            self._await_notes(before + sum(not sent.refused for sent in results))

    def _end(self) -> int:
        place = Partition(self._topics.name("dead_letters"), 0)
        return self._log.end_offsets([place])[place]

    def _await_notes(self, end: int) -> None:
        """Kafka shows a transaction a moment after its commit: the next replay has to see it.

        Raises:
            Timeout: it is not shown, but was sent.
        """
        deadline = time.monotonic() + _VISIBLE_S
        while (shown := self._end()) < end:
            if time.monotonic() > deadline:
                raise Timeout(
                    f"the notes of what was sent again: {self._topics.name('dead_letters')} is to "
                    f"end at {end}, and {shown} is shown",
                    int(_VISIBLE_S * 1000),
                    "All that was told is sent. A replay before its notes are shown sends it once "
                    "more: see `streamrft dead-letters list` first.",
                )
            time.sleep(0.01)

    def _send_one(self, producer: Producer, letter: Letter, ended: set[str]) -> int:
        """Its size in bytes."""
        event, short = letter.event, self._topics.short(letter.event.topic)
        if short not in REPLAYABLE:
            raise _Refused(f"{event.topic}: only {', '.join(REPLAYABLE)} take a record again")
        value = self.value_of(letter)
        if value is None:
            raise _Refused("the record has no value, so nothing could be read of it")
        if (named := _trajectory_id(short, value)) in ended:
            raise _Refused(f"{named} was dropped as invalid, which is its end; its slot is told")
        headers = {**event.headers, REPLAY_HEADER: str(letter.id).encode()}
        finds_home = event.key is not None and CATALOGUE[short].partitions == "run"
        producer.send(
            event.topic,
            value,
            key=event.key,
            partition=None if finds_home else event.partition,
            headers=headers.items(),
        )
        note = ev.Replay(topic=event.topic, dead_letter=letter.id, produced_at=ev.now_ms())
        producer.send(
            self._topics.name("dead_letters"), codec.encode(note), key=event.topic.encode()
        )
        return len(value)

    def _ended_ids(self, wanted: Selection) -> set[str]:
        """Ids among the chosen letters that have a drop `invalid`: their end is told already."""
        named: set[str] = set()
        for letter in self.letters(wanted):
            short = self._topics.short(letter.event.topic)
            if short in _OF_ONE_TRAJECTORY:
                with suppress(OffsetOutOfRange, UnknownTopic):  # told when its turn comes
                    named.add(_trajectory_id(short, self.value_of(letter) or b""))
        named.discard("")
        if not named:
            return named
        starts = begins(self._log, self._topics.name("drops"))
        drops = (event_in(record, ev.Drop) for record in read_to_end(self._log, starts))
        return named & {d.trajectory_id for d in drops if d and d.reason == "invalid"}

    def _events(self) -> Iterable[tuple[int, ev.DeadLetter | ev.Replay]]:
        starts = begins(self._log, self._topics.name("dead_letters"))
        for record in read_to_end(self._log, starts):
            event = event_in(record, ev.DeadLetter, ev.Replay)
            if event is not None:
                yield record.offset, event


class _Refused(StreamrftError):
    """A letter that is not sent again."""


def _trajectory_id(topic: str, value: bytes) -> str:
    """The id that a broken record may still tell, as the readers tried it; empty when none."""
    kind = _OF_ONE_TRAJECTORY.get(topic)
    return codec.peek(value, kind, 1).get("trajectory_id", "") if kind else ""
