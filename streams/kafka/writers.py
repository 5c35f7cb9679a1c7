"""Two ways to make records durable: an idempotent send, and a transaction.

A record is `(topic, partition, key, value, headers, timestamp_ms)`. Nothing is handed to librdkafka
before its batch is complete, so an aborted or killed batch leaves no open transaction behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from ...schemas.errors import EventTooLarge, LogError, LogUnavailable, StreamrftError
from ..log import Partition, Position
from .cluster import Cluster
from .errors import PURGED, is_lost
from .options import RECORD_MARGIN_BYTES

_OUTCOME_S, _ABORT_S, _POSITIONS_S = 60.0, 10.0, 3.0
_STEP_S = 10.0
_POLL_S = 0.01
_SHOWN = 80
# for a writer of many records that needs no positions: it saves a callback a record
ONLY_ERRORS = {"delivery.report.only.error": True}


class Outgoing(NamedTuple):
    """A record with its place."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]
    timestamp_ms: int

    def __str__(self) -> str:
        key = self.key if self.key is None or len(self.key) <= _SHOWN else self.key[:_SHOWN] + b".."
        return f"{self.topic}[{self.partition}] key={key!r}"

    def refused(self, error: KafkaError, cluster: Cluster) -> StreamrftError:
        """The port's error for a record that was not taken."""
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            headers = sum(len(name) + len(value or b"") for name, value in self.headers)
            size = len(self.value or b"") + len(self.key or b"") + headers
            limit = cluster.options.max_event_bytes + RECORD_MARGIN_BYTES
            return EventTooLarge(f"{self}, with key and headers", size, limit)
        return cluster.faults.translated(error, str(self))


class Batch:
    """Records handed over together, with what became of each."""

    def __init__(self, records: Sequence[Outgoing]) -> None:
        self.records = records
        self.positions: list[Position | None] = [None] * len(records)
        self.errors: dict[int, KafkaError] = {}

    def hand_over(self, client: Producer) -> None:
        """Queue every record, waiting for room; one that cannot be queued is among `errors`."""
        for i, record in enumerate(self.records):
            self._queue(client, i, record)
            if not i % 1_000:
                client.poll(0)

    def _queue(self, client: Producer, i: int, record: Outgoing) -> None:
        while True:
            try:
                client.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    headers=record.headers,
                    timestamp=record.timestamp_ms,
                    on_delivery=partial(self._done, i),
                )
                return
            except BufferError:
                client.poll(_POLL_S)
            except KafkaException as raised:
                self.errors[i] = raised.args[0]
                return

    def _done(self, i: int, error: KafkaError | None, record: Any) -> None:
        if error is None:
            self.positions[i] = Position(record.topic(), record.partition(), record.offset())
        else:
            self.errors[i] = error


class Idempotent:
    """The plain way: acknowledged by all in-sync replicas, in order, without repeats.

    After a failure the client is thrown away: its sequence numbers say nothing any more.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._client: Producer | None = None

    def write(self, records: Sequence[Outgoing], timeout_ms: int) -> Batch:
        """Send and wait until each record is acknowledged or has failed."""
        if self._client is None:
            self._client = self._cluster.producer()
        batch = Batch(records)
        batch.hand_over(self._client)
        if self._client.flush(timeout_ms / 1000):
            self._client.purge()
            self._client.flush(1.0)
        if batch.errors:
            self.close()
        return batch

    def close(self) -> None:
        """Drop what was not acknowledged."""
        if self._client is not None:
            self._client.purge()
            self._client.flush(1.0)
            self._client = None


class Transactional:
    """A producer with a transactional id: whoever initialises the id later fences it for good.

    ready -> in a transaction -> ready; lost (fenced, or without an answer), to be made anew
    """

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        settings: Mapping[str, Any] | None = None,
        patience_s: float = _OUTCOME_S,
    ) -> None:
        """Take the id: open transactions of its last user are aborted, that user is fenced."""
        self._cluster, self.id = cluster, transactional_id
        self.is_lost = self.is_fenced = False
        self._is_silent = ONLY_ERRORS.items() <= (settings or {}).items()
        self._client = cluster.producer({"transactional.id": transactional_id, **(settings or {})})
        self._patiently(self._client.init_transactions, patience_s)

    def write(
        self,
        records: Sequence[Outgoing],
        commits: Iterable[tuple[Any, dict[Partition, int]]] = (),
    ) -> list[Position]:
        """One transaction: records and positions of groups together. `commits`: group metadata.

        Raises:
            LogUnavailable: nothing was written, try again.
            Fenced, EventTooLarge: nothing was written.
            LogError: nothing was written, or (said so) nobody knows; begin anew from the log.
        """
        batch = Batch(records)
        try:
            self._client.begin_transaction()
            batch.hand_over(self._client)
            for error in batch.errors.values():
                raise KafkaException(self._cause(error))
            for metadata, positions in commits:
                places = [TopicPartition(t, p, at) for (t, p), at in positions.items()]
                self._send_positions(places, metadata)
            self._commit()
        except KafkaException as raised:
            error = raised.args[0]
            self._give_up(error)
            refused = {i: e for i, e in batch.errors.items() if e.code() not in PURGED}
            if refused and not is_lost(error):
                i, cause = next(iter(refused.items()))
                raise records[i].refused(cause, self._cluster) from raised
            raise self._cluster.faults.translated(error, f"transaction of {self.id!r}") from raised
        except BaseException:
            if not self.is_lost:
                self._abort()
            raise
        assert all(batch.positions) or self._is_silent, "all of it was acknowledged"
        return [at for at in batch.positions if at is not None]

    def _cause(self, error: KafkaError) -> KafkaError:
        """What stands behind `_FATAL`, all that a record hears of a client that is fenced."""
        if error.code() != KafkaError._FATAL:
            return error
        try:
            self._client.abort_transaction(_ABORT_S)
        except KafkaException as raised:
            return raised.args[0]
        return error

    def _send_positions(self, places: list[TopicPartition], metadata: Any) -> None:
        """In a thread that can be left behind.

        librdkafka (its issues 5456, 5511) waits for ever, whatever time-out it is given, for a
        group coordinator that was restarted; a new client of the same id finds it, and fences this.
        """
        outcome: SimpleQueue[KafkaException | None] = SimpleQueue()

        def send() -> None:
            try:
                self._client.send_offsets_to_transaction(places, metadata, _POSITIONS_S)
                outcome.put(None)
            except KafkaException as raised:
                outcome.put(raised)

        Thread(target=send, daemon=True, name="send_offsets_to_transaction").start()
        try:
            raised = outcome.get(timeout=2 * _POSITIONS_S)
        except Empty:
            self.is_lost = True
            raise LogUnavailable(f"transaction of {self.id!r}: the group does not answer") from None
        if raised is not None:
            self.is_lost |= raised.args[0].retriable()
            raise raised

    def _commit(self) -> None:
        """Ask until there is an answer: giving up would leave the outcome unknown."""
        try:
            self._patiently(self._client.commit_transaction, _OUTCOME_S)
        except KafkaException as raised:
            error = raised.args[0]
            if error.fatal() or not error.retriable():
                raise
            self.is_lost = True
            raise LogError(
                f"transaction of {self.id!r}: no answer for {_OUTCOME_S:g} s, so whether it was "
                "committed is unknown. Start this process again: it reads that from the log."
            ) from raised

    def _give_up(self, error: KafkaError) -> None:
        """Leave the transaction; the client is lost when that is not possible."""
        self.is_fenced |= is_lost(error)
        if error.fatal():
            self.is_lost = True
        else:
            self._abort()

    def _abort(self) -> None:
        try:
            self._patiently(self._client.abort_transaction, _ABORT_S)
        except (KafkaException, LogError):
            self.is_lost = True

    def _patiently(self, step: Callable[[float], object], patience_s: float) -> None:
        """Repeat a step that may be repeated."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                step(min(_STEP_S, patience_s))
                return
            except KafkaException as raised:
                error = raised.args[0]
                if not error.retriable() or time.monotonic() > deadline:
                    raise
                if self._cluster.faults.refused is not None:
                    raise self._cluster.faults.translated(error, self.id) from raised
