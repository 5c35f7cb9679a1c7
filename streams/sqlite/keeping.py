"""How the embedded log keeps topics: by the same names as Kafka, as far as they mean something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...schemas.errors import LogError
from ..log import TopicSize, TopicSpec, TopicState
from .store import Store
from .topics import Topic, TopicTable

_FOREVER = "-1"
_COLUMNS = {
    "cleanup.policy": "cleanup",
    "retention.ms": "retention_ms",
    "max.message.bytes": "max_event_bytes",
}


def state_of(spec: TopicSpec) -> TopicState:
    """See `Log.state_for`."""
    return TopicState(
        spec.num_partitions,
        {
            "cleanup.policy": spec.cleanup,
            "retention.ms": _FOREVER if spec.retention_ms is None else str(spec.retention_ms),
            "max.message.bytes": str(spec.max_event_bytes),
        },
    )


class Keeping:
    """Whole topics of one file: how they are kept, what they take, and their change."""

    def __init__(self, store: Store, topics: TopicTable) -> None:
        self._store, self._topics = store, topics

    def sizes(self, names: Iterable[str]) -> dict[str, TopicSize]:
        """See `Log.topic_sizes`: keys, values and headers, without what the file adds."""
        found: dict[str, TopicSize] = {}
        for name in names:
            ((num_records, size_bytes),) = self._store.rows(
                "select count(*), ifnull(sum(ifnull(length(key), 0) + ifnull(length(value), 0) "
                "+ ifnull(length(headers), 0)), 0) from records where topic_id=?",
                (self._topics.get(name).topic_id,),
            )
            found[name] = TopicSize(num_records, size_bytes)
        return found

    def alter(self, name: str, num_partitions: int | None, settings: Mapping[str, str]) -> None:
        """See `Log.alter_topic`."""
        self._topics.forget(name)
        topic = self._topics.get(name)
        values = _values(name, settings)
        before = topic.spec.num_partitions
        wanted = before if num_partitions is None else num_partitions
        if wanted < before:
            raise LogError(
                f"{name}: has {before} partitions; {wanted} asked for, but none can be taken away"
            )
        if values.get("cleanup") == "compact":
            self._demand_keys(topic)
        with self._store.writing() as db:
            for column, value in values.items():
                db.execute(
                    f"update topics set {column}=? where topic_id=?", (value, topic.topic_id)
                )
            db.execute(
                "update topics set num_partitions=? where topic_id=?", (wanted, topic.topic_id)
            )
            db.executemany(
                "insert or ignore into partitions values(?,?,0,0,0)",
                [(topic.topic_id, partition) for partition in range(before, wanted)],
            )
        self._topics.forget(name)

    def _demand_keys(self, topic: Topic) -> None:
        without = self._store.rows(
            "select partition, offset from records where topic_id=? and key is null limit 1",
            (topic.topic_id,),
        )
        if without:
            partition, offset = without[0]
            raise LogError(
                f"{topic.spec.name}[{partition}]@{offset}: has no key, so the last value of each "
                "key cannot be kept. Keep cleanup.policy delete."
            )


def _values(name: str, settings: Mapping[str, str]) -> dict[str, str | int | None]:
    """Columns and their values. Raises LogError for what this log cannot keep."""
    unknown = sorted(set(settings) - set(_COLUMNS))
    if unknown:
        raise LogError(
            f"{name}: {', '.join(unknown)} mean nothing to sqlite:///; known are "
            f"{', '.join(_COLUMNS)}"
        )
    found: dict[str, str | int | None] = {}
    for setting, value in settings.items():
        if setting == "cleanup.policy":
            if value not in ("delete", "compact"):
                raise LogError(f"{name}: cleanup.policy {value!r}; delete or compact is allowed")
            found["cleanup"] = value
        else:
            found[_COLUMNS[setting]] = None if value == _FOREVER else int(value)
    return found
