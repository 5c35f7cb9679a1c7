"""What the trainer says on the log, all of it under its lease."""

from __future__ import annotations

import logging
import time

import msgspec

from ..schemas import codec
from ..schemas.errors import EventTooLarge, LogUnavailable
from ..schemas.events import DeadLetter, Event, now_ms
from ..schemas.topics import Topics, key_of
from ..streams.log import Lease, Log, Record

logger = logging.getLogger("streamrft")

LOG_TIMEOUT_S = 300.0


class Announcer:
    """Publishes events, durable on return; raises Fenced, writing nothing, after a successor."""

    def __init__(self, log: Log, topics: Topics, lease: Lease) -> None:
        self.epoch = lease.epoch
        self._topics = topics
        self._producer = log.producer(fence=lease)

    def publish(self, topic: str, *events: Event) -> None:
        """Append to a topic of the catalogue; all become visible together on the embedded log."""
        for event in events:
            self._producer.send(
                self._topics.name(topic), codec.encode(event), key=key_of(event, topic)
            )
        self._flush()

    def _flush(self) -> None:
        """The producer holds what it could not write, so a log that is away costs only time."""
        deadline = time.monotonic() + LOG_TIMEOUT_S
        while True:
            try:
                self._producer.flush()
                return
            except LogUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("the trainer waits for the log: %s", error)
                time.sleep(1)

    def dead_letter(self, record: Record, error: str, reader: str) -> None:
        """Append a record that could not be read; without its value when that is too large."""
        letter = DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=record.key,
            value=record.value,
            headers=dict(record.headers),
            error=error,
            reader=reader,
            produced_at=now_ms(),
        )
        try:
            self.publish("dead_letters", letter)
        except EventTooLarge:
            self.publish("dead_letters", _without_value(letter))


def _without_value(letter: DeadLetter) -> DeadLetter:
    size = len(letter.value or b"")
    note = f"{letter.error} (its {size:,} bytes are too large to repeat: read them at the position)"
    return msgspec.structs.replace(letter, value=None, error=note)
