"""What a reader keeps of a record that it cannot take: where it lies and why."""

from __future__ import annotations

from ..schemas.events import DeadLetter
from .log import Log, Record

# a replayed record's header: the offset of its dead letter
REPLAY_HEADER = "streamrft-replay-of"
_FIELDS_BYTES = 1024


def dead_letter(
    record: Record, error: str, *, reader: str, now_ms: int, max_bytes: int
) -> DeadLetter:
    """The event about a record; without its value when both would be over `max_bytes`."""
    value = record.value
    around = len(error) + sum(len(k) + len(v) + 20 for k, v in record.headers) + _FIELDS_BYTES
    if value is not None and len(value) + around > max_bytes:
        error = f"{error} (value of {len(value):,} bytes left at its position)"
        value = None
    return DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=value,
        headers=dict(record.headers),
        error=error.encode(errors="replace").decode(),
        reader=reader,
        produced_at=now_ms,
    )


def limit_of(log: Log, topic: str) -> int:
    """The largest value that a topic takes, in bytes. Raises UnknownTopic."""
    return log.describe([topic])[topic].spec.max_event_bytes
