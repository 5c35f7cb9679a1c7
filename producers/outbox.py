"""What an explorer writes: acknowledged when a call returns, sent again while the log is away."""

from __future__ import annotations

from collections.abc import Sequence

from ..schemas import codec
from ..schemas.events import now_ms
from ..schemas.topics import key_of
from ..streams.dead_letters import dead_letter, limit_of
from ..streams.log import Record
from ..streams.process import Process, until_answered

_TIMEOUT_S = 60.0


class Outbox:
    """Writes for one process, in the thread that owns its log."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def send(self, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Append (key, value) records. A repeat after a doubtful failure is the same trajectory.

        Raises:
            LogUnavailable: the log did not answer for a minute.
        """
        name = self._process.topics.name(topic)

        def attempt() -> None:
            producer = self._process.log.producer()
            try:
                for key, value in records:
                    producer.send(name, value, key=key)
                producer.flush()
            finally:
                producer.close()

        until_answered(attempt, self._process.idle, _TIMEOUT_S)

    def dead_letter(self, record: Record, error: Exception) -> None:
        """Keep a record that could not be read, with its position and the reason."""
        limit = limit_of(self._process.log, self._process.topics.name("dead_letters"))
        letter = dead_letter(
            record, str(error), reader=self._process.name, now_ms=now_ms(), max_bytes=limit
        )
        self.send("dead_letters", [(key_of(letter, "dead_letters"), codec.encode(letter))])
