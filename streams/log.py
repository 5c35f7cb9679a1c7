"""The log: the one port that every process of a run reads and writes.

Adapters: `sqlite` (embedded, one machine) and `kafka` (confluent-kafka). The contract
tests in tests/contract run unchanged over each. A `Log` and what it hands out belong to one
thread; processes and threads open their own with `open_log`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from ..schemas.errors import ConfigError, MissingExtra
from ..schemas.topics import CATALOGUE, DEFAULT_MAX_EVENT_BYTES, Topics


class Partition(NamedTuple):
    """One partition of a topic; `topic` is the full name on the log."""

    topic: str
    partition: int


class Position(NamedTuple):
    """One record's place."""

    topic: str
    partition: int
    offset: int


class Record(NamedTuple):
    """A record as the log holds it. Offsets rise in a partition; holes are possible."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    @property
    def position(self) -> Position:
        """Where it lies."""
        return Position(self.topic, self.partition, self.offset)


@dataclass(frozen=True)
class TopicSpec:
    """How a topic is created. `retention_ms` None keeps records for ever."""

    name: str
    num_partitions: int
    cleanup: Literal["delete", "compact"] = "delete"
    retention_ms: int | None = None
    max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES


@dataclass(frozen=True)
class TopicInfo:
    """What the log has: offsets by partition, `begin` the first kept, `end` one past the last."""

    spec: TopicSpec
    begin: Mapping[int, int]
    end: Mapping[int, int]


@dataclass(frozen=True)
class TopicState:
    """How a log keeps a topic.

    `settings` by Kafka's names on every log; always `cleanup.policy`, `retention.ms` (-1: for
    ever) and `max.message.bytes`. `replication`: copies of each record, None where it is the log's
    default or means nothing.
    """

    num_partitions: int
    settings: Mapping[str, str]
    replication: int | None = None


class TopicSize(NamedTuple):
    """What lies on a topic now."""

    num_records: int
    size_bytes: int


@dataclass(frozen=True)
class Lease:
    """A role held by one process. Each holder's `epoch` is higher than all before it.

    A lease that ended in time but was not taken still works: only a successor fences.
    """

    role: str
    owner: str
    epoch: int
    ttl_ms: int


@dataclass(frozen=True)
class Limits:
    """What every adapter enforces, from the configuration."""

    max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES
    session_timeout_ms: int = 10_000
    options: Mapping[str, str] = field(default_factory=dict)


class Consumer(Protocol):
    """A reader: either a member of a group, or of partitions it names itself.

    Members of a group share the partitions: partition p of all subscribed topics goes to one
    member (range co-location), each under a lease with an epoch. A member that stops polling
    for `session_timeout_ms`, or dies, loses them to the others; its later commits raise Fenced.
    """

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: Callable[[list[Partition]], None] | None = None,
        on_revoke: Callable[[list[Partition]], None] | None = None,
    ) -> None:
        """Join the group. Both callbacks run inside `poll` (and on_revoke in `close`).

        A new owner starts at the group's committed positions, or at the first kept record.
        on_revoke runs before the partitions are given up, while commits still work; after a lost
        lease it runs too, and a commit in it raises Fenced. Topics must exist and, except in a
        group's sole topic, have as many partitions as each other.
        """
        ...

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets. No lease, no group needed."""
        ...

    def assignment(self) -> list[Partition]:
        """Partitions read now, sorted."""
        ...

    def poll(self, max_records: int = 500, timeout_ms: int = 0) -> list[Record]:
        """Next committed records, at most `max_records`, in offset order within a partition.

        Waits up to `timeout_ms` for the first one, idle almost for free; renews leases and
        applies assignments, which is all that `max_records` 0 does. Returns [] at the deadline.
        Partitions are served fairly.

        Raises:
            OffsetOutOfRange: the position was deleted by retention or lies past the end.
            LogUnavailable: try again.
        """
        ...

    def positions(self) -> dict[Partition, int]:
        """Next offset of every assigned partition."""
        ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Read on from `offset`."""
        ...

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Leave these out of `poll` until `resume`; leases stay."""
        ...

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Undo `pause`."""
        ...

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """Store next offsets for the group, durably. Raises Fenced when a lease was lost."""
        ...

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The group's stored offsets; a partition without one is absent."""
        ...

    def close(self) -> None:
        """Leave the group at once, so that the others need not wait for the lease."""
        ...


class Producer(Protocol):
    """A writer. Records sent are durable after `flush`, or when the transaction commits.

    `fence`: every flush and transaction first proves that the lease is still held, and raises
    Fenced, writing nothing, otherwise.
    """

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
        """Hand over one record. Without `partition` the key decides by murmur2 (no key: any).

        Raises:
            EventTooLarge: value over the topic's limit. UnknownTopic: no such topic.
        """
        ...

    def flush(self, timeout_ms: int = 30_000) -> list[Position]:
        """Make all sent records durable; positions in the order of `send`. Raises when one was not.

        After LogUnavailable the records are kept for the next flush; any other error drops them.
        Not allowed inside a transaction.

        All records of one flush become visible together on the embedded log; on Kafka they do
        so only inside a transaction.
        """
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """All records sent and positions committed inside become visible together, or none.

        An exception inside aborts. Readers never see an aborted or open transaction.
        """
        ...

    def send_positions(self, consumer: Consumer, positions: Mapping[Partition, int]) -> None:
        """Inside a transaction: commit the group's positions with it.

        The consumer is of the same `Log`. Fenced, when a lease was lost, may come only at the
        transaction's end.
        """
        ...

    def close(self) -> None:
        """Drop what was not flushed."""
        ...


class Log(Protocol):
    """A log: topics, producers, consumers, leases."""

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Create what is missing; let retention and limits grow, never shrink (see `widening`).

        Raises LogError when an existing topic has other partitions, or another cleanup.
        """
        ...

    def describe(self, topics: Iterable[str] | None = None) -> dict[str, TopicInfo]:
        """Named topics, or all. Raises UnknownTopic."""
        ...

    def state_for(self, spec: TopicSpec) -> TopicState:
        """How `ensure_topics` would create it here. Asks nobody."""
        ...

    def topic_states(
        self, topics: Iterable[str] | None = None, *, prefix: str = ""
    ) -> dict[str, TopicState]:
        """How named topics, or all that begin with `prefix`, are kept, also those of others.

        Raises UnknownTopic.
        """
        ...

    def topic_sizes(self, topics: Iterable[str]) -> dict[str, TopicSize]:
        """What lies on topics, counted; only those of which the log can tell. Slow."""
        ...

    def alter_topic(
        self, topic: str, *, num_partitions: int | None = None, settings: Mapping[str, str] = {}
    ) -> None:
        """Change partitions and settings, whatever that deletes or moves. Idempotent.

        Processes that have the topic open see it when they open the log again.

        Raises:
            UnknownTopic: no such topic.
            LogError: fewer partitions than there are, or a setting that this log does not have.
        """
        ...

    def delete_topic(self, topic: str) -> None:
        """Remove a topic with its records and committed positions. Unknown: no error."""
        ...

    def producer(self, *, fence: Lease | None = None) -> Producer:
        """A new writer, under a lease when given."""
        ...

    def consumer(self, *, group: str | None = None, member: str | None = None) -> Consumer:
        """A new reader. `member` names it in errors and stays the same across a restart."""
        ...

    def read_at(self, positions: Sequence[Position]) -> list[Record]:
        """Exactly these records, in this order. Raises OffsetOutOfRange for one that is gone."""
        ...

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """One past the last committed record of each."""
        ...

    def offsets_at(
        self, partitions: Iterable[Partition], timestamp_ms: int
    ) -> dict[Partition, int]:
        """First offset with a timestamp at or after `timestamp_ms`; the end when there is none."""
        ...

    def acquire(self, role: str, *, owner: str, ttl_ms: int, timeout_ms: int) -> Lease:
        """Take a role with the next epoch: at once from a dead process, else when its lease ended.

        Raises:
            Timeout: a living process held it all the time; the message names it.
        """
        ...

    def renew(self, lease: Lease) -> None:
        """Prolong by `ttl_ms`, to be called every third of it. Raises Fenced when it was taken."""
        ...

    def release(self, lease: Lease) -> None:
        """Give it up now. No error when it was taken already."""
        ...

    def reopen(self) -> Log:
        """Another connection to the same log, to be closed by itself; for another thread."""
        ...

    def close(self) -> None:
        """Release connections. Open transactions are aborted."""
        ...


def open_log(url: str, limits: Limits | None = None) -> Log:
    """Open the log named by `event_log:`, `sqlite:///path/log.db` or `kafka://host:9092`.

    Raises:
        ConfigError: another scheme.
    """
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from .sqlite.log import SqliteLog

        return SqliteLog(url, limits or Limits())
    if scheme == "kafka":
        return _open_kafka(url, limits or Limits())
    raise ConfigError(f"event_log: {url!r} begins with neither sqlite:/// nor kafka://")


def _open_kafka(url: str, limits: Limits) -> Log:
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise MissingExtra("confluent-kafka", "kafka") from error
    from .kafka.log import KafkaLog

    return KafkaLog(url, limits)


def topic_specs(
    topics: Topics,
    *,
    retention_ms: Mapping[str, int | None] | None = None,
    max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
) -> list[TopicSpec]:
    """The catalogue as specs of one run. `retention_ms` by catalogue name; None keeps for ever."""
    kept = {"hours": 24 * 3_600_000}
    return [
        TopicSpec(
            topics.name(name),
            topics.partitions(name),
            "compact" if topic.kept == "compact" else "delete",
            (retention_ms or {}).get(name, kept.get(topic.kept)),
            max_event_bytes,
        )
        for name, topic in CATALOGUE.items()
    ]
