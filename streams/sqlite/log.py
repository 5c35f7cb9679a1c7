"""The embedded log: one SQLite file that all processes of one machine share. See `log.Log`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...schemas.errors import ConfigError
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
from .consumer import SqliteConsumer
from .keeping import Keeping, state_of
from .producer import SqliteProducer
from .records import read_exact
from .roles import Roles
from .store import DEFAULT_BUSY_TIMEOUT_MS, Store
from .topics import TopicTable
from .upkeep import DEFAULT_TOMBSTONE_MS, Upkeep

_SCHEME = "sqlite:///"
_OPTIONS = {"busy_timeout_ms": DEFAULT_BUSY_TIMEOUT_MS, "tombstone_ms": DEFAULT_TOMBSTONE_MS}


class SqliteLog:
    """Topics, producers, consumers and leases in one file: WAL mode, synchronous FULL.

    A process killed at any moment loses nothing acknowledged. One that is stopped inside a commit
    keeps the file's lock until it goes on or dies: writers get LogUnavailable, readers read on.
    Use from the thread that opened it.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        """Open `sqlite:///relative/log.db` or `sqlite:////absolute/log.db`, creating the folder.

        Raises:
            ConfigError: no path in the URL, or an unknown option.
            LogError: the file is no streamrft log of this version.
        """
        path = url.removeprefix(_SCHEME)
        if not path or path == url:
            raise ConfigError(f"event_log: {url!r} names no file; write sqlite:///path/log.db")
        options = _options(limits)
        self._url, self._limits = url, limits
        self._store = Store(Path(path), options["busy_timeout_ms"])
        self._topics = TopicTable(self._store)
        self._keeping = Keeping(self._store, self._topics)
        self._roles = Roles(self._store)
        self._upkeep = Upkeep(self._store, options["tombstone_ms"])
        self._consumers: list[SqliteConsumer] = []

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        """See `Log.ensure_topics`."""
        self._topics.ensure(specs)

    def describe(self, topics: Iterable[str] | None = None) -> dict[str, TopicInfo]:
        """See `Log.describe`."""
        return self._topics.describe(topics)

    def state_for(self, spec: TopicSpec) -> TopicState:
        """See `Log.state_for`."""
        return state_of(spec)

    def topic_states(
        self, topics: Iterable[str] | None = None, *, prefix: str = ""
    ) -> dict[str, TopicState]:
        """See `Log.topic_states`."""
        return {
            name: state_of(info.spec)
            for name, info in self.describe(topics).items()
            if topics is not None or name.startswith(prefix)
        }

    def topic_sizes(self, topics: Iterable[str]) -> dict[str, TopicSize]:
        """See `Log.topic_sizes`."""
        return self._keeping.sizes(topics)

    def alter_topic(
        self, topic: str, *, num_partitions: int | None = None, settings: Mapping[str, str] = {}
    ) -> None:
        """See `Log.alter_topic`."""
        self._keeping.alter(topic, num_partitions, settings)

    def delete_topic(self, topic: str) -> None:
        """See `Log.delete_topic`."""
        self._topics.delete(topic)

    def producer(self, *, fence: Lease | None = None) -> SqliteProducer:
        """See `Log.producer`."""
        return SqliteProducer(
            self._store,
            self._topics,
            self._roles,
            self._upkeep,
            fence,
            self._limits.max_event_bytes,
        )

    def consumer(self, *, group: str | None = None, member: str | None = None) -> SqliteConsumer:
        """See `Log.consumer`."""
        consumer = SqliteConsumer(
            self._store, self._topics, group, member, self._limits.session_timeout_ms
        )
        self._consumers = [c for c in self._consumers if not c.is_closed] + [consumer]
        return consumer

    def read_at(self, positions: Sequence[Position]) -> list[Record]:
        """See `Log.read_at`."""
        return read_exact(self._store, self._topics, positions)

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """See `Log.end_offsets`."""
        bounds = self._topics.bounds(self._topics.ids(partitions))
        return {partition: end for partition, (_, end) in bounds.items()}

    def offsets_at(
        self, partitions: Iterable[Partition], timestamp_ms: int
    ) -> dict[Partition, int]:
        """See `Log.offsets_at`."""
        ids = self._topics.ids(partitions)
        found: dict[Partition, int] = {}
        with self._store.reading() as db:
            bounds = self._topics.bounds(ids)
            for place, partition in ids.items():
                row = db.execute(
                    "select offset from records where topic_id=? and partition=? "
                    "and timestamp_ms>=? order by offset limit 1",
                    (*place, timestamp_ms),
                ).fetchone()
                found[partition] = row[0] if row else bounds[partition][1]
        return found

    def acquire(self, role: str, *, owner: str, ttl_ms: int, timeout_ms: int) -> Lease:
        """See `Log.acquire`."""
        return self._roles.acquire(role, owner=owner, ttl_ms=ttl_ms, timeout_ms=timeout_ms)

    def renew(self, lease: Lease) -> None:
        """See `Log.renew`."""
        self._roles.renew(lease)

    def release(self, lease: Lease) -> None:
        """See `Log.release`."""
        self._roles.release(lease)

    def reopen(self) -> SqliteLog:
        """See `Log.reopen`."""
        return SqliteLog(self._url, self._limits)

    def close(self) -> None:
        """See `Log.close`. Groups are left at once, without callbacks."""
        for consumer in self._consumers:
            consumer.abandon()
        self._store.close()


def _options(limits: Limits) -> dict[str, int]:
    unknown = sorted(set(limits.options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"event_log options: {', '.join(unknown)} mean nothing to sqlite:///; known are "
            f"{', '.join(_OPTIONS)}"
        )
    return {name: int(limits.options.get(name, usual)) for name, usual in _OPTIONS.items()}
