"""Membership of one consumer in a Kafka group: who it is there, what comes to it and what goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from confluent_kafka import Consumer, TopicPartition

from ...schemas.errors import LogError
from ..log import Partition
from .cluster import Cluster

_UNRELEASED_S, _REJOIN_S = 90.0, 0.2

Rebalanced = Callable[[list[Partition]], None]


class Shares(Protocol):
    """What a consumer reads, as its membership changes it."""

    def begin(self, partition: Partition, offset: int) -> None:
        """Read a partition from `offset` on."""
        ...

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Read these no more."""
        ...

    def assignment(self) -> list[Partition]:
        """What is read now."""
        ...


class Membership:
    """outside -> joined, its shares changing in callbacks inside `poll` -> joined anew, or closed.

    `consumer` (the broker assigns, shares move one by one) or `classic` (all stop, range decides).
    A named member is static: a restart within its session takes its shares up at once.
    """

    def __init__(
        self,
        cluster: Cluster,
        shares: Shares,
        group: str,
        member: str | None,
        topics: Sequence[str],
        callbacks: tuple[Rebalanced | None, Rebalanced | None],
    ) -> None:
        """`callbacks`: on_assign and on_revoke of the caller."""
        self._cluster, self._shares = cluster, shares
        self._group, self._member, self._topics = group, member, topics
        self._on_assign, self._on_revoke = callbacks
        self.is_incremental = cluster.group_protocol() == "consumer"
        self._failure: LogError | None = None
        self._waits_since = 0.0

    def join(self) -> Consumer:
        """A client that is about to join; callbacks run inside its polls."""
        client = self._cluster.consumer(self._settings())
        client.subscribe(
            list(self._topics),
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
        )
        return client

    def _settings(self) -> dict[str, Any]:
        session_ms = self._cluster.options.session_timeout_ms
        settings: dict[str, Any] = {"group.id": self._group, "max.poll.interval.ms": session_ms}
        if self._member is not None:
            settings["group.instance.id"] = self._member
        if self.is_incremental:
            return settings | {"group.protocol": "consumer", "group.remote.assignor": "range"}
        if "heartbeat.interval.ms" not in self._cluster.options.base:
            settings["heartbeat.interval.ms"] = max(100, min(3_000, session_ms // 3))
        return settings | {
            "group.protocol": "classic",
            "partition.assignment.strategy": "range",
            "session.timeout.ms": session_ms,
        }

    def take_failure(self) -> LogError | None:
        """What went wrong inside a callback since the last call: the member has to join anew."""
        failure, self._failure = self._failure, None
        return failure

    def may_wait(self) -> bool:
        """Whether a living member of our name may still be the session of a killed one."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _UNRELEASED_S:
            return False
        time.sleep(_REJOIN_S)
        return True

    def lose(self, partitions: list[Partition]) -> None:
        """Shares that are gone without a callback of the group."""
        self._shares.drop(partitions)
        if partitions and self._on_revoke is not None:
            self._on_revoke(partitions)

    def silence(self) -> None:
        """Call nobody back any more."""
        self._on_assign = self._on_revoke = None

    def _assigned(self, client: Consumer, found: list[TopicPartition]) -> None:
        partitions = sorted(Partition(at.topic, at.partition) for at in found)
        try:
            starts = self._starts(client, partitions)
        except LogError as error:
            self._failure = error
            return
        self._waits_since = 0.0
        for partition, offset in starts.items():
            self._shares.begin(partition, offset)
        places = [TopicPartition(*p, offset) for p, offset in starts.items()]
        if self.is_incremental:
            client.incremental_assign(places)
        else:
            client.assign(places)
        if partitions and self._on_assign is not None:
            self._on_assign(partitions)

    def _starts(self, client: Consumer, partitions: list[Partition]) -> dict[Partition, int]:
        """The group's committed positions, or the first kept records."""
        stored = self._cluster.committed(self._group, partitions, client)
        fresh = self._cluster.begins(p for p in partitions if p not in stored)
        return {p: stored[p] if p in stored else fresh[p] for p in partitions}

    def _revoked(self, client: Consumer, found: list[TopicPartition]) -> None:
        partitions = self._held(found)
        try:
            if partitions and self._on_revoke is not None:
                self._on_revoke(partitions)
        finally:
            self._shares.drop(partitions)
            self._unassign(client, found)

    def _lost(self, client: Consumer, found: list[TopicPartition]) -> None:
        """Leases that are gone already: a commit in the callback is fenced."""
        partitions = self._held(found)
        self._unassign(client, found)
        self.lose(partitions)

    def _held(self, found: list[TopicPartition]) -> list[Partition]:
        held = set(self._shares.assignment())
        return sorted(held & {Partition(at.topic, at.partition) for at in found})

    def _unassign(self, client: Consumer, found: list[TopicPartition]) -> None:
        if self.is_incremental:
            client.incremental_unassign(found)
        else:
            client.unassign()
