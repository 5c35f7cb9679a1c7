"""Events appended to the topics of a run and read back."""

from __future__ import annotations

from typing import TypeVar

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import CATALOGUE, Topics, key_of
from streamrft.streams.log import Log, Partition
from streamrft.streams.reading import begins, committed, read_to_end

E = TypeVar("E", bound=ev.Event)


def append_events(log: Log, topics: Topics, topic: str, *events: ev.Event) -> None:
    """Append to a topic of the catalogue; acknowledged on return."""
    producer = log.producer()
    for event in events:
        producer.send(topics.name(topic), codec.encode(event), key=key_of(event, topic))
    producer.flush()
    producer.close()


def events_on(log: Log, topics: Topics, topic: str, *kinds: type[E]) -> list[E]:
    """Events of these kinds, in order within each partition; every record must be an event."""
    records = read_to_end(log, begins(log, topics.name(topic)))
    found = [codec.decode(r.value, *CATALOGUE[topic].carries) for r in records]
    return [event for event in found if isinstance(event, kinds)]


def num_uncommitted(log: Log, topics: Topics) -> int:
    """Records of tasks that the explorers' group has not committed."""
    name = topics.name("tasks")
    places = [Partition(name, p) for p in range(topics.partitions("tasks"))]
    done = committed(log, f"{topics.namespace}.explorers", places)
    return sum(end - done.get(p, 0) for p, end in log.end_offsets(places).items())
