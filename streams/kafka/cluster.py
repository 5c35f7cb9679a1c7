"""Clients of one Kafka cluster, and the questions that are asked without reading records."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType
from confluent_kafka.admin._listoffsets import EarliestSpec, LatestSpec

from ...schemas.errors import ConfigError, LogUnavailable
from ..log import Partition
from .errors import Faults
from .options import Options

logger = logging.getLogger("streamrft.kafka")
logger.setLevel(logging.CRITICAL + 1)  # librdkafka repeats what errors say, for every attempt

REQUEST_S = 15.0
_EARLIEST, _LATEST = EarliestSpec(), LatestSpec()
# a member waits inside a callback, where it hears neither SIGTERM nor its group
_STABLE_S, _COORDINATOR_S = 3.0, 3.0
_RETRY_S = 0.05
_SLICE_S = 0.3


class Cluster:
    """Makes clients and asks; one for a `KafkaLog`, of the thread that owns it.

    connecting (refused: an error at once; silent: an error at the deadline) -> connected
    """

    def __init__(self, options: Options) -> None:
        """Connect.

        Raises:
            LogUnavailable: no broker answers. AccessDenied: it refuses the user.
            ConfigError: an unknown option, or a value that librdkafka refuses.
        """
        self.options = options
        self.faults = Faults(options.servers)
        self.admin = self._made(lambda settings: AdminClient(settings, logger=logger), {})
        self._askers: dict[str, Consumer] = {}
        self._group_protocol = options.group_protocol
        self._connect()

    def producer(self, settings: Mapping[str, Any] | None = None) -> Producer:
        """A producer with the promises of the port."""
        wanted = {**self.options.producing, **(settings or {})}
        return self._made(lambda all_: Producer(all_, logger=logger), wanted)

    def consumer(self, settings: Mapping[str, Any]) -> Consumer:
        """A consumer that sees committed records only and never moves by itself."""
        wanted = {**self.options.consuming, **settings}
        return self._made(lambda all_: Consumer(all_, logger=logger), wanted)

    def _made(self, make: Callable[[dict[str, Any]], Any], settings: Mapping[str, Any]) -> Any:
        try:
            return make({**self.options.base, **settings, "error_cb": self.faults.heard})
        except KafkaException as error:
            raise ConfigError(
                f"event_log.options: {error.args[0].str()}. Names and values are those of "
                "librdkafka's CONFIGURATION.md."
            ) from error

    def _connect(self) -> None:
        deadline = time.monotonic() + self.options.connect_timeout_ms / 1000
        while True:
            self.admin.poll(0)
            try:
                self.admin.list_topics(timeout=_SLICE_S)
                return
            except KafkaException as raised:
                error = raised.args[0]
                if self.faults.refused is not None:
                    raise self.faults.translated(error, self.options.servers) from raised
                if time.monotonic() > deadline:
                    raise LogUnavailable(
                        f"event_log: no broker answers at {self.options.servers} within "
                        f"{self.options.connect_timeout_ms / 1000:g} s. Start it, or mend the "
                        f"address. {self.faults.why()}"
                    ) from raised

    def result(self, future: Future[Any], what: str) -> Any:
        """What a request of the admin client gave, its error translated."""
        with self.faults.explained(what):
            return future.result(REQUEST_S + 5)

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """One past the last committed record (with the markers behind it)."""
        return self.offsets(partitions, _LATEST)

    def highest(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """One past the last record, also of transactions that are open."""
        return self.offsets(partitions, _LATEST, committed=False)

    def begins(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first kept offset."""
        return self.offsets(partitions, _EARLIEST)

    def offsets(
        self, partitions: Iterable[Partition], spec: OffsetSpec, *, committed: bool = True
    ) -> dict[Partition, int]:
        """Offsets by partition; -1 where a time has none. Raises UnknownTopic."""
        wanted = {TopicPartition(*p): spec for p in dict.fromkeys(partitions)}
        if not wanted:
            return {}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        def ask() -> dict[Partition, int]:
            asked = self.admin.list_offsets(
                wanted, isolation_level=level, request_timeout=REQUEST_S
            )
            return {
                Partition(at.topic, at.partition): self._offset(at, future)
                for at, future in asked.items()
            }

        return self._patient(ask, topics={p.topic for p in wanted})

    def _offset(self, at: TopicPartition, future: Future[Any]) -> int:
        """Raises LogUnavailable where librdkafka has no answer and no error, only OFFSET_INVALID.

        So it was seen (2.16) while a broker was started again; taken for an end, it hides records.
        """
        place = f"{at.topic}[{at.partition}]"
        offset = self.result(future, place).offset
        if offset == OFFSET_INVALID:
            raise LogUnavailable(f"{place}: no broker says which offsets it has. Try again.")
        return offset

    def committed(
        self, group: str, partitions: Iterable[Partition], member: Consumer | None = None
    ) -> dict[Partition, int]:
        """A group's stored offsets; a member waits for transactions that may still move them.

        Not asked of the admin client: librdkafka 2.16 aborts the process when a coordinator is
        restarted meanwhile.
        """
        wanted = [TopicPartition(*p) for p in partitions]
        if not wanted:
            return {}
        client = member if member is not None else self._asker(group)

        def ask() -> dict[Partition, int]:
            try:
                found = client.committed(wanted, timeout=_COORDINATOR_S)
            except KafkaException as raised:
                said = client.poll(0) if member is None else None
                error = (said.error() if said is not None else None) or raised.args[0]
                raise self.faults.translated(error, f"group {group!r}") from raised
            for at in found:
                if at.error is not None:
                    raise self.faults.translated(at.error, f"group {group!r}, {at.topic}")
            return {Partition(at.topic, at.partition): at.offset for at in found if at.offset >= 0}

        return self._patient(ask, _STABLE_S if member is not None else 2 * _COORDINATOR_S)

    def _asker(self, group: str) -> Consumer:
        """A client that only asks for the offsets of a group, kept for the next time."""
        if group not in self._askers:
            settings = {"group.id": group, "isolation.level": "read_uncommitted"}
            self._askers[group] = self.consumer(settings)
        return self._askers[group]

    def close(self) -> None:
        """Release the clients that only ask."""
        for client in self._askers.values():
            client.close()
        self._askers.clear()

    def _patient(
        self, ask: Callable[[], Any], patience_s: float = REQUEST_S, topics: Iterable[str] = ()
    ) -> Any:
        """Ask again while the cluster is moving a leader or finishing a transaction."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return ask()
            except LogUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
                self._find_leaders(topics)

    def _find_leaders(self, topics: Iterable[str]) -> None:
        """What librdkafka remembers of leaders is not mended by a request that they refuse."""
        for topic in topics:
            with suppress(KafkaException):  # the next answer says what is wrong
                self.admin.list_topics(topic, timeout=_SLICE_S)

    def group_protocol(self) -> str:
        """`consumer` where the brokers offer it with range and our session, else `classic`.

        The brokers alone set the session of `consumer` (45 s unless configured); a dead member
        must not keep its shares for longer than the port says.
        """
        if self._group_protocol is None:
            offered = self._broker_settings()
            protocols = offered.get("group.coordinator.rebalance.protocols") or ""
            assignors = offered.get("group.consumer.assignors") or ""
            session_ms = int(offered.get("group.consumer.session.timeout.ms") or 0)
            is_offered = "consumer" in protocols.split(",") and "range" in assignors
            is_in_time = session_ms <= self.options.session_timeout_ms
            self._group_protocol = "consumer" if is_offered and is_in_time else "classic"
        return self._group_protocol

    def _broker_settings(self) -> dict[str, str]:
        """Settings of one broker; none where we may not ask for them."""
        brokers = self.admin.list_topics(timeout=REQUEST_S).brokers
        resource = ConfigResource(ResourceType.BROKER, str(min(brokers)))
        (future,) = self.admin.describe_configs([resource]).values()
        try:
            return {name: entry.value for name, entry in future.result(REQUEST_S).items()}
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                raise self.faults.translated(raised.args[0], "settings of a broker") from raised
            return {}
