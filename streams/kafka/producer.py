"""Appending to Kafka: a flush waits for acknowledgements, a transaction is Kafka's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import KafkaError

from ...schemas.errors import EventTooLarge, LogError, LogUnavailable, StreamrftError, UnknownTopic
from ...schemas.events import now_ms
from ...schemas.topics import partition_for
from ..log import Consumer, Partition, Position, TopicSpec
from .cluster import Cluster
from .consumer import KafkaConsumer
from .topics import Topics
from .writers import ONLY_ERRORS, Batch, Idempotent, Outgoing, Transactional


class Fence:
    """What a producer under a lease asks before it writes, and whose transactions it uses."""

    def __init__(self, check: Callable[[], None], writer: Transactional) -> None:
        self.check, self.writer = check, writer


class KafkaProducer:
    """See `Producer`. Nothing is sent before `flush` or the end of a transaction."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        plain: Idempotent,
        fence: Fence | None,
        transactional_id: Callable[[str], str],
    ) -> None:
        """`transactional_id` gives this producer its id when it needs one, by a topic's name."""
        self._cluster, self._topics, self._plain = cluster, topics, plain
        self._fence, self._new_id = fence, transactional_id
        self._writer: Transactional | None = None
        self._pending: list[Outgoing] = []
        self._acknowledged: list[Position | None] = []
        self._commits: list[tuple[KafkaConsumer, dict[Partition, int]]] = []
        self._in_transaction = False
        self._turn = 0

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """See `Producer.send`."""
        found = self._topics.get(topic)
        if value is not None and len(value) > self._limit(found):
            found = self._topics.look_up([topic])[topic]
            if len(value) > self._limit(found):
                raise EventTooLarge(f"{topic} key={key!r}", len(value), self._limit(found))
        if partition is None:
            partition = self._place(key, found.num_partitions)
        elif not 0 <= partition < found.num_partitions:
            raise UnknownTopic(
                f"{topic}[{partition}]: has partitions 0..{found.num_partitions - 1}"
            )
        if key is None and found.cleanup == "compact":
            raise LogError(f"{topic}: keeps the last value of each key; send a key")
        stamp = now_ms() if timestamp_ms is None else timestamp_ms
        self._pending.append(Outgoing(topic, partition, key, value, list(headers), stamp))

    def _limit(self, found: TopicSpec) -> int:
        return min(found.max_event_bytes, self._cluster.options.max_event_bytes)

    def _place(self, key: bytes | None, num_partitions: int) -> int:
        if key is not None:
            return partition_for(key, num_partitions)
        self._turn += 1
        return self._turn % num_partitions

    def flush(self, timeout_ms: int = 30_000) -> list[Position]:
        """See `Producer.flush`. After LogUnavailable, and only then, flush again."""
        if self._in_transaction:
            raise LogError("flush inside a transaction: its end makes the records durable")
        try:
            if self._fence is not None:
                positions = self._write_fenced(self._fence)
            else:
                positions = self._write_plain(timeout_ms)
        except LogUnavailable:
            raise
        except StreamrftError:
            self._forget()
            raise
        self._forget()
        return positions

    def _write_plain(self, timeout_ms: int) -> list[Position]:
        """Send what is not acknowledged yet, which after a failure may be a part."""
        self._acknowledged += [None] * (len(self._pending) - len(self._acknowledged))
        left = [i for i, at in enumerate(self._acknowledged) if at is None]
        if left:
            with self._cluster.faults.explained("flush"):
                batch = self._plain.write([self._pending[i] for i in left], timeout_ms)
            for i, at in zip(left, batch.positions, strict=True):
                self._acknowledged[i] = at
            self._judge(batch)
        return [at for at in self._acknowledged if at is not None]

    def _judge(self, batch: Batch) -> None:
        """Raise for the first record that failed; one that was refused before one that waits."""
        errors = sorted(batch.errors.items(), key=lambda found: found[1].retriable())
        for i, error in errors[:1]:
            record = batch.records[i]
            if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                self._topics.forget(record.topic)
            raise record.refused(error, self._cluster)

    def _write_fenced(self, fence: Fence) -> list[Position]:
        fence.check()
        if not self._pending and not self._commits:
            return []
        return self._transact(fence.writer)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """See `Producer.transaction`. It is open at the broker at its end only."""
        if self._in_transaction:
            raise LogError("a transaction inside a transaction")
        if self._pending:
            raise LogError(
                f"{len(self._pending)} records were sent before the transaction: flush them first"
            )
        self._in_transaction = True
        try:
            yield
            if self._fence is not None:
                self._write_fenced(self._fence)
            elif self._pending or self._commits:
                self._transact(self._own_writer())
        finally:
            self._in_transaction = False
            self._forget()

    def _own_writer(self) -> Transactional:
        """Made when it is needed. A lost one's id is taken again, but never one that was fenced."""
        before = self._writer
        if before is None or before.is_lost:
            names = [r.topic for r in self._pending]
            names += [p.topic for _, positions in self._commits for p in positions]
            if before is None or before.is_fenced:
                own_id = self._new_id(names[0])
            else:
                own_id = before.id
            with self._cluster.faults.explained("transactions"):
                settings = {**self._cluster.options.member_transactions, **ONLY_ERRORS}
                self._writer = before = Transactional(self._cluster, own_id, settings)
        return before

    def _transact(self, writer: Transactional) -> list[Position]:
        commits = [(consumer.credentials(at), at) for consumer, at in self._commits]
        try:
            return writer.write(self._pending, commits)
        except LogError:
            if self._fence is not None:
                self._fence.check()
            raise

    def send_positions(self, consumer: Consumer, positions: Mapping[Partition, int]) -> None:
        """See `Producer.send_positions`. The lease is checked when the transaction ends."""
        if not self._in_transaction:
            raise LogError("send_positions outside a transaction: use consumer.commit")
        if not isinstance(consumer, KafkaConsumer) or not consumer.is_on(self._cluster):
            raise LogError("send_positions: producer and consumer must come from the same Log")
        if positions:
            self._commits.append((consumer, dict(positions)))

    def close(self) -> None:
        """See `Producer.close`."""
        self._forget()
        self._writer = None

    def _forget(self) -> None:
        self._pending, self._acknowledged, self._commits = [], [], []
