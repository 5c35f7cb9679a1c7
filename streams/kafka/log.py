"""The distributed log: topics of an Apache Kafka cluster. See `log.Log`."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka.admin import OffsetSpec

from ..log import (
    Lease,
    Limits,
    Partition,
    Position,
    Record,
    TopicInfo,
    TopicSize,
    TopicSpec,
    TopicState,
)
from .cluster import Cluster
from .consumer import KafkaConsumer
from .keeping import Keeping
from .options import Options
from .producer import Fence, KafkaProducer
from .reader import ExactReader
from .roles import Roles
from .topics import Topics
from .writers import ONLY_ERRORS, Idempotent, Transactional

_SUCCESSION_S = 3.0


class KafkaLog:
    """Topics, producers, consumers and leases on a cluster; replication and order are Kafka's.

    Use from the thread that opened it.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        """Connect to `kafka://host:9092[,host2:9092]`.

        Raises:
            ConfigError: no such URL or option. LogUnavailable: no broker answers.
            AccessDenied: the brokers refuse the user.
        """
        self._url, self._limits = url, limits
        self._cluster = Cluster(Options.of(url, limits))
        self._topics = Topics(self._cluster)
        self._keeping = Keeping(self._cluster, self._topics)
        self._plain = Idempotent(self._cluster)
        self._roles = Roles(self._cluster, self._topics, self._plain)
        self._reader = ExactReader(self._cluster, self._topics)
        self._consumers: list[KafkaConsumer] = []
        self._stable_id: str | None = None

    @property
    def options(self) -> Options:
        """Addresses, rights and limits, for another client of the same cluster."""
        return self._cluster.options

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """See `Log.ensure_topics`."""
        self._topics.ensure(specs)

    def describe(self, topics: Iterable[str] | None = None) -> dict[str, TopicInfo]:
        """See `Log.describe`."""
        return self._topics.describe(topics)

    def state_for(self, spec: TopicSpec) -> TopicState:
        """See `Log.state_for`."""
        return self._keeping.state_for(spec)

    def topic_states(
        self, topics: Iterable[str] | None = None, *, prefix: str = ""
    ) -> dict[str, TopicState]:
        """See `Log.topic_states`."""
        return self._keeping.states(topics, prefix)

    def topic_sizes(self, topics: Iterable[str]) -> dict[str, TopicSize]:
        """See `Log.topic_sizes`. The client cannot ask the brokers, so nothing is told."""
        return {}

    def alter_topic(
        self, topic: str, *, num_partitions: int | None = None, settings: Mapping[str, str] = {}
    ) -> None:
        """See `Log.alter_topic`."""
        self._keeping.alter(topic, num_partitions, settings)

    def delete_topic(self, topic: str) -> None:
        """See `Log.delete_topic`."""
        self._topics.delete(topic)

    def producer(self, *, fence: Lease | None = None) -> KafkaProducer:
        """See `Log.producer`. Under a lease, flushes are transactions too."""
        under = None
        if fence is not None:
            writer = self._roles.writer(fence)
            under = Fence(lambda: self._roles.check(fence), writer)
        return KafkaProducer(
            self._cluster, self._topics, self._plain, under, self._transactional_id
        )

    def successor(self, name: str) -> KafkaProducer:
        """A writer under a name: whoever had it before is fenced, what it left open is aborted.

        For a process that knows from elsewhere that it is the one to write, in transactions only.
        """
        settings = {**self._cluster.options.member_transactions, **ONLY_ERRORS}
        with self._cluster.faults.explained(f"transactions of {name!r}"):
            writer = Transactional(self._cluster, name, settings, _SUCCESSION_S)
        return KafkaProducer(
            self._cluster,
            self._topics,
            self._plain,
            Fence(lambda: None, writer),
            self._transactional_id,
        )

    def _transactional_id(self, topic: str) -> str:
        """One that stays over a restart for the first writer beside a named member, else a new one.

        A member's successor of the same name thereby ends what a killed or paused one left open.
        """
        stable, self._stable_id = self._stable_id, None
        return stable or f"{topic.rpartition('.')[0] or 'streamrft'}.{secrets.token_hex(6)}"

    def consumer(self, *, group: str | None = None, member: str | None = None) -> KafkaConsumer:
        """See `Log.consumer`."""
        consumer = KafkaConsumer(self._cluster, self._topics, group, member)
        self._consumers = [c for c in self._consumers if not c.is_closed] + [consumer]
        if group is not None and member is not None and self._stable_id is None:
            self._stable_id = f"{group}.{member}"
        return consumer

    def read_at(self, positions: Sequence[Position]) -> list[Record]:
        """See `Log.read_at`."""
        return self._reader.read(positions) if positions else []

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """See `Log.end_offsets`. Markers of transactions count: positions go past them too."""
        wanted = [Partition(*p) for p in partitions]
        self._topics.demand(wanted)
        return self._cluster.ends(wanted)

    def offsets_at(
        self, partitions: Iterable[Partition], timestamp_ms: int
    ) -> dict[Partition, int]:
        """See `Log.offsets_at`."""
        wanted = [Partition(*p) for p in partitions]
        self._topics.demand(wanted)
        found = self._cluster.offsets(wanted, OffsetSpec.for_timestamp(timestamp_ms))
        ends = self._cluster.ends([p for p, offset in found.items() if offset < 0])
        return found | ends

    def acquire(self, role: str, *, owner: str, ttl_ms: int, timeout_ms: int) -> Lease:
        """See `Log.acquire`."""
        return self._roles.acquire(role, owner=owner, ttl_ms=ttl_ms, timeout_ms=timeout_ms)

    def renew(self, lease: Lease) -> None:
        """See `Log.renew`."""
        self._roles.renew(lease)

    def release(self, lease: Lease) -> None:
        """See `Log.release`."""
        self._roles.release(lease)

    def reopen(self) -> KafkaLog:
        """See `Log.reopen`."""
        return KafkaLog(self._url, self._limits)

    def close(self) -> None:
        """See `Log.close`. Groups are left at once, without callbacks."""
        for consumer in self._consumers:
            consumer.abandon()
        self._roles.close()
        self._reader.close()
        self._plain.close()
        self._cluster.close()
