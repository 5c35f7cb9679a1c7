"""Reading from Faust: whatever it repeats, leaves out or shuffles, the log decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrft.schemas.errors import LogError, OffsetOutOfRange
from streamrft.streams.faust.consumer import FaustConsumer
from streamrft.streams.faust.exchange import Exchange
from streamrft.streams.faust.membership import HostedFaust
from streamrft.streams.log import Limits, Log, Partition, Record, TopicSpec, open_log
from streamrft.streams.waiting import CAPACITY, CAPACITY_BYTES

TOPICS = ("a", "b")
NUM = 12


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Iterator[Log]:
    """Two topics of two partitions, twelve records in each."""
    log = open_log(f"sqlite:///{tmp_path_factory.mktemp('log')}/log.db", Limits())
    log.ensure_topics([TopicSpec(t, 2) for t in TOPICS])
    producer = log.producer()
    for topic, partition, i in itertools.product(TOPICS, range(2), range(NUM)):
        producer.send(topic, f"{topic}{partition}.{i}".encode(), partition=partition)
    producer.flush()
    yield log
    log.close()


def record(topic: str, partition: int, offset: int) -> Record:
    value = f"{topic}{partition}.{offset}".encode()
    return Record(topic, partition, offset, 0, None, value, ())


def reading(log: Log) -> tuple[FaustConsumer, Exchange]:
    """A consumer with all partitions, each from its first offset."""
    exchange = Exchange()
    consumer = FaustConsumer(log, HostedFaust(), exchange)
    consumer.subscribe(TOPICS)
    exchange.assign(Partition(t, p) for t in TOPICS for p in range(2))
    consumer.poll()
    for place in consumer.assignment():
        consumer.seek(place, 0)
    return consumer, exchange


def drained(consumer: FaustConsumer, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """What it gives until every partition is at its end."""
    monkeypatch.setattr("streamrft.streams.faust.consumer.LOOK_INTERVAL_S", 0.0)
    found: list[Record] = []
    for _ in range(100):
        found += consumer.poll(5)
        if set(consumer.positions().values()) == {NUM}:
            return found
    raise AssertionError(f"stands at {consumer.positions()}")


# how long an example takes says how busy the machine is
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

offsets = st.lists(st.integers(0, NUM - 1), max_size=3 * NUM)
deliveries = st.lists(
    st.tuples(st.sampled_from(TOPICS), st.integers(0, 1), st.integers(0, NUM - 1)), max_size=60
)


@settings(max_examples=150, suppress_health_check=SUPPRESSED)
@given(deliveries, st.integers(1, 20))
def test_every_record_comes_once_and_in_order_whatever_faust_brings(
    log, monkeypatch, delivered, chunk
):
    consumer, exchange = reading(log)
    found: list[Record] = []
    for i in range(0, len(delivered), chunk):
        for at in delivered[i : i + chunk]:
            exchange.put(record(*at))
        found += consumer.poll(4)
    found += drained(consumer, monkeypatch)
    consumer.close()
    for topic, partition in itertools.product(TOPICS, range(2)):
        of_one = [r for r in found if (r.topic, r.partition) == (topic, partition)]
        assert [r.offset for r in of_one] == list(range(NUM))
        assert [r.value for r in of_one] == [f"{topic}{partition}.{i}".encode() for i in range(NUM)]


def test_what_faust_brings_in_order_is_not_read_again(log):
    consumer, exchange = reading(log)
    for topic, partition, i in itertools.product(TOPICS, range(2), range(NUM)):
        exchange.put(record(topic, partition, i))
    assert len(consumer.poll(1_000)) == 4 * NUM
    assert consumer.metrics == {"gaps": 0, "gap_records": 0, "repeats": 0}


def test_a_gap_is_read_from_the_log_and_counted(log):
    consumer, exchange = reading(log)
    for i in (0, 1, 6, 7):
        exchange.put(record("a", 0, i))
    found = consumer.poll(1_000)
    found += consumer.poll(1_000)
    assert [r.offset for r in found][:8] == list(range(8))
    assert consumer.metrics["gaps"] == 1
    assert consumer.metrics["gap_records"] >= 4


def test_a_sought_partition_is_read_from_there_again(log, monkeypatch):
    consumer, exchange = reading(log)
    for i in range(NUM):
        exchange.put(record("a", 0, i))
    consumer.poll(1_000)
    consumer.seek(Partition("a", 0), 3)
    found = [r.offset for r in drained(consumer, monkeypatch) if (r.topic, r.partition) == ("a", 0)]
    assert found == list(range(3, NUM))


def test_a_partition_is_served_only_once_it_has_a_position(log):
    exchange = Exchange()
    consumer = FaustConsumer(log, HostedFaust(), exchange)
    consumer.subscribe(TOPICS)
    exchange.assign([Partition("a", 0), Partition("b", 0)])
    exchange.put(record("a", 0, 4))
    assert consumer.poll(10) == []
    assert consumer.positions() == {}
    consumer.seek(Partition("a", 0), 4)
    assert [r.offset for r in consumer.poll(10)] == [4]


def test_a_partition_that_goes_is_told_and_forgotten(log):
    told: list[list[Partition]] = []
    exchange = Exchange()
    consumer = FaustConsumer(log, HostedFaust(), exchange)
    consumer.subscribe(TOPICS, on_revoke=told.append)
    exchange.assign(Partition(t, p) for t in TOPICS for p in range(2))
    consumer.poll()
    consumer.seek(Partition("a", 1), 0)
    exchange.assign([Partition("a", 0), Partition("b", 0)])
    exchange.put(record("a", 1, 0))
    assert consumer.poll(10) == []
    assert told == [[Partition("a", 1), Partition("b", 1)]]
    assert consumer.positions() == {}


def test_a_paused_partition_waits_and_loses_nothing(log, monkeypatch):
    consumer, exchange = reading(log)
    consumer.pause([Partition("a", 0)])
    for i in range(NUM):
        exchange.put(record("a", 0, i))
    assert all(r.topic != "a" or r.partition for r in consumer.poll(1_000))
    consumer.resume([Partition("a", 0)])
    found = [r.offset for r in drained(consumer, monkeypatch) if (r.topic, r.partition) == ("a", 0)]
    assert found == list(range(NUM))


def test_faust_waits_while_the_worker_has_enough(log):
    _, exchange = reading(log)
    for i in range(CAPACITY):
        assert not exchange.is_full
        exchange.put(record("a", 0, i))
    assert exchange.is_full


def test_a_position_behind_the_end_is_refused_as_what_comes_would_be_taken_for_repeats(
    log, monkeypatch
):
    monkeypatch.setattr("streamrft.streams.faust.consumer.LOOK_INTERVAL_S", 0.0)
    consumer, exchange = reading(log)
    consumer.seek(Partition("b", 1), NUM + 3)
    exchange.put(record("b", 1, 0))
    with pytest.raises(OffsetOutOfRange, match=rf"b\[1\]@{NUM + 3}"):
        consumer.poll(10)


def test_a_few_large_records_are_enough(log):
    consumer, exchange = reading(log)
    large = record("a", 0, 0)._replace(value=bytes(CAPACITY_BYTES // 4))
    for i in range(4):
        assert not exchange.is_full
        exchange.put(large._replace(offset=i))
    assert exchange.is_full
    assert [r.offset for r in consumer.poll(1)] == [0]
    assert not exchange.is_full
    for i in range(4, 8):
        exchange.put(large._replace(offset=i))
    assert [r.offset for r in consumer.poll(1)] == [1]
    assert not exchange.is_full, "three quarters wait: there was room"
    for i in range(8, 12):
        exchange.put(large._replace(offset=i))
    consumer.poll(1)
    assert exchange.is_full, "the worker takes no more until it has handed these out"


def test_topics_with_different_partitions_are_refused(log):
    log.ensure_topics([TopicSpec("c", 3)])
    consumer = FaustConsumer(log, HostedFaust(), Exchange())
    with pytest.raises(LogError, match="different numbers of partitions"):
        consumer.subscribe(("a", "c"))
