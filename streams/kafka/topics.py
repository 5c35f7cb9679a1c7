"""Topics on Kafka: created, described, removed, and known by their number of partitions."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from ...schemas.errors import AccessDenied, LogError, UnknownTopic
from ..log import Partition, TopicInfo, TopicSpec
from ..widening import demand_same, widened
from .cluster import REQUEST_S, Cluster
from .options import RECORD_MARGIN_BYTES

_FOREVER = "-1"
_SETTLE_S = 15.0
_LONGEST_SEGMENT_MS = 7 * 24 * 3_600_000
# the newest segment is never compacted: small ones keep short what a restarted reader has to read
_DIRTY_RATIO, _COMPACTED_SEGMENT_BYTES, _COMPACTED_SEGMENT_MS = "0.2", 16 * 2**20, 3_600_000


class Topics:
    """The topics of one cluster by name. Found ones are remembered; a removed one is forgotten."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, TopicSpec] = {}

    def get(self, name: str) -> TopicSpec:
        """The topic of that name. Raises UnknownTopic, or AccessDenied."""
        found = self._known.get(name)
        return found if found is not None else self.look_up([name])[name]

    def forget(self, name: str) -> None:
        """Ask the cluster again next time."""
        self._known.pop(name, None)

    def partitions(self, name: str) -> list[Partition]:
        """All partitions of a topic."""
        return [Partition(name, p) for p in range(self.get(name).num_partitions)]

    def demand(self, partitions: Iterable[Partition]) -> None:
        """Raise UnknownTopic for a topic that is not there, or a number too high."""
        for name, partition in partitions:
            num = self.get(name).num_partitions
            if not 0 <= partition < num:
                raise UnknownTopic(f"{name}[{partition}]: has partitions 0..{num - 1}")

    def look_up(self, names: Iterable[str]) -> dict[str, TopicSpec]:
        """Ask the cluster for topics now. Raises UnknownTopic, or AccessDenied."""
        wanted = list(names)
        for name in wanted:
            self.forget(name)
        if not wanted:
            return {}
        counts = self._counts(wanted)
        for name, settings in self._settings(wanted).items():
            self._known[name] = _spec(name, counts[name], settings)
        return {name: self._known[name] for name in wanted}

    def demand_present(self, names: Iterable[str]) -> None:
        """Raise UnknownTopic when one was removed, LogUnavailable when nobody answers at once."""
        wanted = sorted(names)
        if wanted:
            self._counts(wanted, timeout_s=1.0)

    def _counts(self, names: list[str], timeout_s: float = REQUEST_S) -> dict[str, int]:
        asked = self._cluster.admin.describe_topics(
            TopicCollection(names), request_timeout=timeout_s
        )
        return {
            name: len(self._cluster.result(future, name).partitions)
            for name, future in asked.items()
        }

    def _settings(self, names: list[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        asked = self._cluster.admin.describe_configs(resources, request_timeout=REQUEST_S)
        return {
            resource.name: {
                n: entry.value for n, entry in self._cluster.result(future, resource.name).items()
            }
            for resource, future in asked.items()
        }

    def ensure(self, specs: Iterable[TopicSpec]) -> None:
        """Create what is missing; retention and limits grow to the given ones."""
        wanted = {spec.name: spec for spec in specs}
        for spec in wanted.values():
            if spec.num_partitions < 1:
                raise LogError(
                    f"{spec.name}: {spec.num_partitions} partitions; at least 1 is needed"
                )
        present = self._cluster.admin.list_topics(timeout=REQUEST_S).topics
        missing = [spec for name, spec in wanted.items() if name not in present]
        self._create(missing)
        found = self.await_topics(wanted)
        for name, spec in wanted.items():
            demand_same(found[name], spec)
            made = self._as_made(spec)
            if found[name] != made and found[name] != (wide := widened(found[name], made)):
                self._alter(wide)

    def await_topics(self, names: Iterable[str]) -> dict[str, TopicSpec]:
        """The topics of these names, once every broker knows them."""
        wanted = list(names)
        return _until(lambda: self.look_up(wanted), ", ".join(wanted))

    def _create(self, specs: list[TopicSpec]) -> None:
        if not specs:
            return
        options = self._cluster.options
        asked = self._cluster.admin.create_topics(
            [
                NewTopic(
                    spec.name,
                    num_partitions=spec.num_partitions,
                    replication_factor=options.replication,
                    config=self.config_of(spec),
                )
                for spec in specs
            ],
            request_timeout=REQUEST_S,
        )
        for name, future in asked.items():
            try:
                future.result(REQUEST_S)
            except KafkaException as raised:
                if raised.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self._cluster.faults.translated(raised.args[0], name) from raised

    def config_of(self, spec: TopicSpec) -> dict[str, str]:
        """Properties that a topic is created with: the options' own win."""
        return {**_config(spec), **self._cluster.options.topic}

    def _as_made(self, spec: TopicSpec) -> TopicSpec:
        return _spec(spec.name, spec.num_partitions, self.config_of(spec))

    def set_config(self, name: str, config: Mapping[str, str]) -> None:
        """Set properties of a topic. The brokers know of them a moment later."""
        entries = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        (future,) = self._cluster.admin.incremental_alter_configs([resource]).values()
        self._cluster.result(future, name)

    def _alter(self, spec: TopicSpec) -> None:
        config = self.config_of(spec)
        del config["cleanup.policy"]
        own = _config(spec)
        config |= {name: own[name] for name in ("retention.ms", "max.message.bytes")}
        try:
            self.set_config(spec.name, config)
        except AccessDenied as error:
            raise AccessDenied(
                f"{error} Its retention or size limit differs from the configuration: found "
                f"{self._known[spec.name]}, wanted {spec}."
            ) from error
        until_seen(lambda: self.look_up([spec.name])[spec.name] == spec, spec.name)

    def describe(self, names: Iterable[str] | None) -> dict[str, TopicInfo]:
        """Named topics, or all that are not Kafka's own."""
        if names is None:
            found = self._cluster.admin.list_topics(timeout=REQUEST_S).topics
            names = [name for name in sorted(found) if not name.startswith("__")]
        specs = self.look_up(names)
        places = [Partition(n, p) for n, spec in specs.items() for p in range(spec.num_partitions)]
        begins, ends = self._cluster.begins(places), self._cluster.ends(places)
        return {
            name: TopicInfo(
                spec,
                {p: begins[Partition(name, p)] for p in range(spec.num_partitions)},
                {p: ends[Partition(name, p)] for p in range(spec.num_partitions)},
            )
            for name, spec in specs.items()
        }

    def delete(self, name: str) -> None:
        """Remove a topic, and wait until nobody is told of it any more."""
        self.forget(name)
        asked = self._cluster.admin.delete_topics([name], operation_timeout=REQUEST_S)
        try:
            asked[name].result(REQUEST_S)
        except KafkaException as raised:
            if raised.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return
            raise self._cluster.faults.translated(raised.args[0], name) from raised
        until_seen(lambda: self._is_gone(name), f"{name} to be removed")

    def _is_gone(self, name: str) -> bool:
        try:
            self._counts([name])
        except UnknownTopic:
            return True
        return False


class _Again(LogError):
    """Not yet."""


def until_seen(is_seen: Callable[[], bool], what: str) -> None:
    """Wait until it is true. Raises LogError at the deadline."""

    def ask() -> None:
        if not is_seen():
            raise _Again("not yet")

    _until(ask, what)


def _until(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the brokers agree: what a controller wrote reaches them a moment later."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            return ask()
        except (UnknownTopic, _Again) as error:
            if time.monotonic() > deadline:
                raise LogError(f"{what}: not seen within {_SETTLE_S:g} s") from error
            time.sleep(0.02)


def _config(spec: TopicSpec) -> dict[str, str]:
    """Properties of a topic. Old records leave by whole segments, so these follow the retention."""
    found = {
        "cleanup.policy": spec.cleanup,
        "retention.ms": _FOREVER if spec.retention_ms is None else str(spec.retention_ms),
        "retention.bytes": _FOREVER,
        "max.message.bytes": str(spec.max_event_bytes + RECORD_MARGIN_BYTES),
        "message.timestamp.type": "CreateTime",
        "compression.type": "producer",
    }
    if spec.retention_ms is not None:
        found["segment.ms"] = str(max(1_000, min(_LONGEST_SEGMENT_MS, spec.retention_ms // 8)))
    if spec.cleanup == "compact":
        largest = spec.max_event_bytes + RECORD_MARGIN_BYTES
        found["min.cleanable.dirty.ratio"] = _DIRTY_RATIO
        found["segment.bytes"] = str(max(_COMPACTED_SEGMENT_BYTES, largest))
        found.setdefault("segment.ms", str(_COMPACTED_SEGMENT_MS))
    return found


def _spec(name: str, num_partitions: int, settings: dict[str, str]) -> TopicSpec:
    kept = settings["retention.ms"]
    return TopicSpec(
        name,
        num_partitions,
        "compact" if "compact" in settings["cleanup.policy"].split(",") else "delete",
        None if kept == _FOREVER else int(kept),
        max(0, int(settings["max.message.bytes"]) - RECORD_MARGIN_BYTES),
    )
