"""What the trainer says on the log, all of it under its lease."""

from __future__ import annotations

import logging
from functools import partial

from ..schemas import codec
from ..schemas.events import Event, now_ms
from ..schemas.topics import Topics, key_of
from ..streams.dead_letters import dead_letter, limit_of
from ..streams.log import Lease, Log, Record
from ..streams.process import until_answered

logger = logging.getLogger("streamrft")


class Announcer:
    """Publishes events, durable on return; raises Fenced, writing nothing, after a successor."""

    def __init__(self, log: Log, topics: Topics, lease: Lease) -> None:
        self.epoch = lease.epoch
        self._log, self._topics = log, topics
        self._producer = log.producer(fence=lease)

    def publish(self, topic: str, *events: Event) -> None:
        """Append to a topic of the catalogue; all become visible together on the embedded log."""
        for event in events:
            self._producer.send(
                self._topics.name(topic), codec.encode(event), key=key_of(event, topic)
            )
        # the producer holds what it could not write, so a log that is away costs only time
        until_answered(self._producer.flush, partial(logger.warning, "the trainer waits for %s"))

    def dead_letter(self, record: Record, error: str, reader: str) -> None:
        """Append a record that could not be read; without its value when that is too large."""
        limit = limit_of(self._log, self._topics.name("dead_letters"))
        letter = dead_letter(record, error, reader=reader, now_ms=now_ms(), max_bytes=limit)
        self.publish("dead_letters", letter)
