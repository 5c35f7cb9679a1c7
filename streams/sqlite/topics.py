"""Topics of the embedded log: created, found by name, described, removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...schemas.errors import LogError, UnknownTopic
from ..log import Partition, TopicInfo, TopicSpec
from ..widening import demand_same, widened
from .store import Store

_DELETE_BATCH = 5_000


@dataclass(frozen=True, eq=False, slots=True)
class Topic:
    """A topic as a row of the file. `topic_id` is never used again, also after a removal."""

    topic_id: int
    spec: TopicSpec

    @property
    def is_kept_up(self) -> bool:
        """Whether records leave it by themselves."""
        return self.spec.retention_ms is not None or self.spec.cleanup == "compact"


class TopicTable:
    """The topics of one file, by name. Found ones are remembered: their partitions never change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Topic] = {}

    def get(self, name: str) -> Topic:
        """The topic of that name. Raises UnknownTopic."""
        topic = self._known.get(name)
        return topic if topic is not None else self._look_up(name)

    def ids(self, partitions: Iterable[Partition]) -> dict[tuple[int, int], Partition]:
        """Partitions by (topic_id, partition). Raises UnknownTopic, also for a number too high."""
        found: dict[tuple[int, int], Partition] = {}
        for name, partition in partitions:
            topic = self.get(name)
            if not 0 <= partition < topic.spec.num_partitions:
                raise UnknownTopic(
                    f"{name}[{partition}]: has partitions 0..{topic.spec.num_partitions - 1}"
                )
            found[topic.topic_id, partition] = Partition(name, partition)
        return found

    def bounds(self, ids: Mapping[tuple[int, int], Partition]) -> dict[Partition, tuple[int, int]]:
        """First kept and next offset of partitions as `ids` gave them. Raises UnknownTopic."""
        topic_ids = sorted({topic_id for topic_id, _ in ids})
        rows = self._store.rows(
            "select topic_id, partition, first_offset, next_offset from partitions "
            f"where topic_id in ({', '.join('?' * len(topic_ids))})",
            topic_ids,
        )
        found = {
            ids[topic_id, partition]: (begin, end)
            for topic_id, partition, begin, end in rows
            if (topic_id, partition) in ids
        }
        for name, _ in ids.values() if len(found) < len(ids) else ():
            self.forget(name)
            self.get(name)
        return found

    def forget(self, name: str) -> None:
        """Ask the file again next time: the topic turned out to be gone."""
        self._known.pop(name, None)

    def ensure(self, specs: Iterable[TopicSpec]) -> None:
        """Create what is missing; retention and limits grow to the given ones."""
        for spec in specs:
            if spec.num_partitions < 1:
                raise LogError(
                    f"{spec.name}: {spec.num_partitions} partitions; at least 1 is needed"
                )
            self._known.pop(spec.name, None)
            try:
                found = self._look_up(spec.name).spec
            except UnknownTopic:
                found = self._create(spec)
            demand_same(found, spec)
            if found != spec and found != (wide := widened(found, spec)):
                self._alter(wide)

    def describe(self, names: Iterable[str] | None) -> dict[str, TopicInfo]:
        """Named topics, or all."""
        if names is None:
            names = [
                name
                for (name,) in self._store.rows(
                    "select name from topics where name is not null order by name"
                )
            ]
        return {name: self._describe(name) for name in names}

    def _describe(self, name: str) -> TopicInfo:
        with self._store.reading():
            spec = self._look_up(name).spec
            ids = self.ids(Partition(name, p) for p in range(spec.num_partitions))
            bounds = self.bounds(ids)
        begin = {p.partition: at for p, (at, _) in bounds.items()}
        return TopicInfo(spec, begin, {p.partition: at for p, (_, at) in bounds.items()})

    def delete(self, name: str) -> None:
        """Remove the topic at once, then its records in batches; a killed removal is taken up."""
        self.forget(name)
        with self._store.writing() as db:
            found = db.execute("select topic_id from topics where name=?", (name,)).fetchone()
            if found is not None:
                db.execute("update topics set name=null where topic_id=?", found)
                for table in ("partitions", "committed", "latest"):
                    db.execute(f"delete from {table} where topic_id=?", found)
        for (topic_id,) in self._store.rows("select topic_id from topics where name is null"):
            self._delete_records(topic_id)

    def _delete_records(self, topic_id: int) -> None:
        num_deleted = _DELETE_BATCH
        while num_deleted == _DELETE_BATCH:
            with self._store.writing() as db:
                num_deleted = db.execute(
                    "delete from records where id in "
                    "(select id from records where topic_id=? limit ?)",
                    (topic_id, _DELETE_BATCH),
                ).rowcount
        with self._store.writing() as db:
            db.execute("delete from topics where topic_id=?", (topic_id,))

    def _look_up(self, name: str) -> Topic:
        rows = self._store.rows(
            "select topic_id, num_partitions, cleanup, retention_ms, max_event_bytes "
            "from topics where name=?",
            (name,),
        )
        if not rows:
            self.forget(name)
            raise UnknownTopic(
                f"{name}: no such topic on {self._store.path}. Create it with ensure_topics."
            )
        topic_id, *settings = rows[0]
        self._known[name] = topic = Topic(topic_id, TopicSpec(name, *settings))
        return topic

    def _create(self, spec: TopicSpec) -> TopicSpec:
        with self._store.writing() as db:
            created = db.execute(
                "insert into topics(name, num_partitions, cleanup, retention_ms, max_event_bytes) "
                "values(?,?,?,?,?) on conflict(name) do nothing returning topic_id",
                (
                    spec.name,
                    spec.num_partitions,
                    spec.cleanup,
                    spec.retention_ms,
                    spec.max_event_bytes,
                ),
            ).fetchone()
            if created is not None:
                db.executemany(
                    "insert into partitions values(?,?,0,0,0)",
                    [(created[0], partition) for partition in range(spec.num_partitions)],
                )
        return self._look_up(spec.name).spec

    def _alter(self, spec: TopicSpec) -> None:
        with self._store.writing() as db:
            db.execute(
                "update topics set retention_ms=?, max_event_bytes=? where name=?",
                (spec.retention_ms, spec.max_event_bytes, spec.name),
            )
        self._look_up(spec.name)
