"""How Kafka keeps topics: their settings as the brokers have them, compared, shown and changed."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable, Mapping

from confluent_kafka import TopicCollection
from confluent_kafka.admin import ConfigResource, ConfigSource, NewPartitions, ResourceType

from ...schemas.errors import LogError
from ..log import TopicSpec, TopicState
from .cluster import REQUEST_S, Cluster
from .topics import Topics, until_seen

_ALWAYS = {
    "cleanup.policy",
    "retention.ms",
    "retention.bytes",
    "max.message.bytes",
    "message.timestamp.type",
    "compression.type",
    "min.insync.replicas",
    "min.cleanable.dirty.ratio",
    "segment.bytes",
    "segment.ms",
}


class Keeping:
    """Whole topics of one cluster, also of those that somebody else made."""

    def __init__(self, cluster: Cluster, topics: Topics) -> None:
        self._cluster, self._topics = cluster, topics

    def state_for(self, spec: TopicSpec) -> TopicState:
        """See `Log.state_for`."""
        replication = self._cluster.options.replication
        return TopicState(
            spec.num_partitions,
            self._topics.config_of(spec),
            replication if replication > 0 else None,
        )

    def states(self, names: Iterable[str] | None, prefix: str = "") -> dict[str, TopicState]:
        """See `Log.topic_states`. What the brokers' defaults say is left out, but for a few."""
        if names is None:
            found = self._cluster.admin.list_topics(timeout=REQUEST_S).topics
            names = [n for n in sorted(found) if n.startswith(prefix) and not n.startswith("__")]
        wanted = list(names)
        if not wanted:
            return {}
        asked = self._cluster.admin.describe_topics(
            TopicCollection(wanted), request_timeout=REQUEST_S
        )
        partitions = {
            name: self._cluster.result(future, name).partitions for name, future in asked.items()
        }
        settings = self._settings(wanted)
        return {
            name: TopicState(
                len(partitions[name]),
                settings[name],
                min(len(p.replicas) for p in partitions[name]),
            )
            for name in wanted
        }

    def _settings(self, names: list[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        asked = self._cluster.admin.describe_configs(resources, request_timeout=REQUEST_S)
        shown = _ALWAYS | set(self._cluster.options.topic)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return {
            resource.name: {
                name: entry.value
                for name, entry in sorted(self._cluster.result(future, resource.name).items())
                if name in shown or entry.source == own
            }
            for resource, future in asked.items()
        }

    def alter(self, name: str, num_partitions: int | None, settings: Mapping[str, str]) -> None:
        """See `Log.alter_topic`."""
        found = self.states([name])[name]
        if num_partitions is not None and num_partitions < found.num_partitions:
            raise LogError(
                f"{name}: has {found.num_partitions} partitions; {num_partitions} asked for, but "
                "none can be taken away"
            )
        if num_partitions is not None and num_partitions > found.num_partitions:
            self._add_partitions(name, num_partitions)
        changed = {n: v for n, v in settings.items() if found.settings.get(n) != v}
        if changed:
            self._topics.set_config(name, changed)
        until_seen(lambda: self._has(name, num_partitions, changed), f"{name} as altered")
        self._topics.forget(name)

    def _add_partitions(self, name: str, num_partitions: int) -> None:
        asked = self._cluster.admin.create_partitions(
            [NewPartitions(name, num_partitions)], request_timeout=REQUEST_S
        )
        self._cluster.result(asked[name], name)

    def _has(self, name: str, num_partitions: int | None, settings: Mapping[str, str]) -> bool:
        found = self.states([name])[name]
        return num_partitions in (None, found.num_partitions) and all(
            found.settings.get(n) == v for n, v in settings.items()
        )
