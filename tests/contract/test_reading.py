"""Topics are read up to the ends that they have, and no wait for an end lasts for ever."""

from __future__ import annotations

import pytest

from streamrft.schemas import codec
from streamrft.schemas.errors import LogUnavailable
from streamrft.schemas.events import Branch
from streamrft.schemas.topics import Topics
from streamrft.streams import reading
from streamrft.streams.log import Partition, TopicSpec
from streamrft.streams.reading import begins, drain, read_events, read_to_end


def test_a_topic_is_read_to_the_end_that_it_has(place):
    log = place.open()
    name = place.create(log, "many", 3)
    producer = log.producer()
    for i in range(100):
        producer.send(name, b"%d" % i, partition=i % 3)
    producer.flush()
    assert sorted(int(r.value or b"") for r in read_to_end(log, begins(log, name))) == list(
        range(100)
    )
    reader = log.consumer()
    reader.assign({Partition(name, 1): 30, Partition(name, 2): 0})
    found = list(drain(log, reader, [Partition(name, 1)]))
    assert [r.offset for r in found if r.partition == 1] == [30, 31, 32]
    assert reader.positions()[Partition(name, 1)] == 33


def test_records_that_are_no_events_are_left_out_and_a_missing_topic_is_empty(place):
    log, topics = place.open(), Topics(place.name("run"))
    assert list(read_events(log, topics, "checkpoints")) == []
    log.ensure_topics([TopicSpec(topics.name("checkpoints"), 1)])
    branch = Branch(branch="b", parent="main", step=1, produced_at=1)
    producer = log.producer()
    for value in (b"noise", codec.encode(branch), None):
        producer.send(topics.name("checkpoints"), value, key=b"b/1")
    producer.flush()
    assert list(read_events(log, topics, "checkpoints")) == [branch]


def test_an_end_out_of_reach_is_named(place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "_STALLED_S", 0.2)
    log = place.open()
    name = place.create(log, "far", 1)
    producer = log.producer()
    producer.send(name, b"x", partition=0)
    producer.flush()
    reader = log.consumer()
    reader.assign({Partition(name, 0): 0})
    reader.pause([Partition(name, 0)])
    with pytest.raises(LogUnavailable, match=r"stands at 0 .* its end 1 is out of reach"):
        list(drain(log, reader))
