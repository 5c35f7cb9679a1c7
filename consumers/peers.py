"""Who else is at work: heartbeats of the processes that feed the trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..schemas.errors import LogUnavailable
from ..schemas.events import Heartbeat
from ..schemas.topics import Topics
from ..streams.log import Log, Partition, Record
from ..streams.reading import event_in

logger = logging.getLogger("streamrft")

FEEDING_ROLES = frozenset({"scheduler", "explorer", "join"})
FRESH_S = 10.0


class Peers:
    """The newest heartbeat of every feeding process since the trainer began to look."""

    def __init__(self, log: Log, topics: Topics) -> None:
        name = topics.name("heartbeats")
        partitions = [Partition(name, p) for p in range(topics.partitions("heartbeats"))]
        self._consumer = log.consumer()
        self._consumer.assign(log.end_offsets(partitions))
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self._is_answered = True

    def look(self) -> None:
        """Read the heartbeats that came; while the log is away those from before are known."""
        for record in self._polled():
            beat = event_in(record, Heartbeat)
            if beat is not None and beat.role in FEEDING_ROLES:
                self._beats[beat.process] = time.monotonic(), beat

    def _polled(self) -> Sequence[Record]:
        was_answered, self._is_answered = self._is_answered, False
        try:
            records = self._consumer.poll(500)
        except LogUnavailable as error:
            if was_answered:
                logger.warning("heartbeats of others are not read: %s", error)
            return ()
        self._is_answered = True
        return records

    def is_anyone_working(self) -> bool:
        """Whether one of them said within 10 s that it works, not that it waits or ended."""
        now = time.monotonic()
        return any(
            beat.state == "alive" and now - at < FRESH_S for at, beat in self._beats.values()
        )

    def describe(self) -> str:
        """Each with its state and the age of its word, for people."""
        if not self._beats:
            return "No scheduler, explorer or join gave a sign of life."
        now = time.monotonic()
        words = [
            f"{name} {_state(beat)}{', silent for ' if now - at > FRESH_S else ' '}"
            f"{now - at:.0f} s{'' if now - at > FRESH_S else ' ago'}"
            for name, (at, beat) in sorted(self._beats.items())
        ]
        return f"Last seen: {'; '.join(words)}."

    def loading(self) -> set[int]:
        """Policy versions that explorers said within 10 s they are loading."""
        self.look()
        now = time.monotonic()
        return {
            int(beat.metrics["loading_version"])
            for at, beat in self._beats.values()
            if now - at < FRESH_S and "loading_version" in beat.metrics
        }

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()


def _state(beat: Heartbeat) -> str:
    return f"waiting for {beat.waiting_for}" if beat.state == "idle" else beat.state
