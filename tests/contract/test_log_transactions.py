"""Transactions of the log: records and positions together or not at all, on every adapter."""

import random

import pytest
from log_process import read

from streamrft.schemas.errors import EventTooLarge, LogError
from streamrft.streams.log import Partition


class Crash(Exception):
    """A process that ends in the middle of a transaction."""


@pytest.fixture
def source(place, log):
    """A topic with four records in each partition."""
    topic = place.create(log, "source")
    producer = log.producer()
    for i in range(16):
        producer.send(topic, b"%d" % i, partition=i % 4)
    producer.flush()
    producer.close()
    return topic


@pytest.fixture
def worker(place, log, source):
    """A consumer of the source that has read everything."""
    consumer = log.consumer(group=place.patient_group("workers"))
    consumer.subscribe([source])
    read(consumer, 16)
    yield consumer
    consumer.close()


def values_of(place, topic, num_records):
    log = place.open()
    consumer = log.consumer()
    consumer.assign({Partition(topic, p): 0 for p in range(4)})
    values = sorted(r.value or b"" for r in read(consumer, num_records))
    assert consumer.poll(timeout_ms=100) == []
    return values


def test_records_of_a_transaction_become_visible_when_it_ends(place, log, topic, partitions):
    watcher = place.open().consumer()
    watcher.assign(dict.fromkeys(partitions, 0))
    own = log.consumer()
    own.assign(dict.fromkeys(partitions, 0))
    producer = log.producer()
    with producer.transaction():
        for p in range(4):
            producer.send(topic, b"v%d" % p, partition=p)
        assert watcher.poll(timeout_ms=200) == []
        assert own.poll(timeout_ms=50) == []
    assert sorted(r.value or b"" for r in read(watcher, 4)) == [b"v0", b"v1", b"v2", b"v3"]


def test_aborted_transaction_leaves_nothing_and_the_next_one_works(place, log, topic):
    producer = log.producer()
    with pytest.raises(RuntimeError, match="on purpose"):
        with producer.transaction():
            producer.send(topic, b"aborted")
            raise RuntimeError("on purpose")
    with producer.transaction():
        producer.send(topic, b"kept")
    assert values_of(place, topic, 1) == [b"kept"]


def test_refused_record_aborts_its_transaction(place, log, topic):
    small = place.create(log, "small", max_event_bytes=10)
    producer = log.producer()
    with pytest.raises(EventTooLarge):
        with producer.transaction():
            producer.send(topic, b"aborted")
            producer.send(small, b"x" * 11)
    with producer.transaction():
        producer.send(topic, b"kept")
    assert values_of(place, topic, 1) == [b"kept"]


def test_positions_are_committed_with_the_records(place, log, topic, source, worker):
    producer = log.producer()
    positions = worker.positions()
    with producer.transaction():
        producer.send(topic, b"v")
        producer.send_positions(worker, positions)
        assert worker.committed(positions) == {}
    assert worker.committed(positions) == positions
    assert values_of(place, topic, 1) == [b"v"]


def test_aborted_transaction_commits_no_positions(log, topic, worker):
    producer = log.producer()
    with pytest.raises(RuntimeError):
        with producer.transaction():
            producer.send(topic, b"v")
            producer.send_positions(worker, worker.positions())
            raise RuntimeError
    assert worker.committed(worker.assignment()) == {}


def test_transaction_of_positions_alone_commits_them(log, worker):
    producer = log.producer()
    with producer.transaction():
        producer.send_positions(worker, worker.positions())
    assert worker.committed(worker.assignment()) == worker.positions()


def test_empty_transaction_is_allowed(log):
    producer = log.producer()
    with producer.transaction():
        pass
    assert producer.flush() == []


def test_positions_outside_a_transaction_are_an_error(log, worker):
    with pytest.raises(LogError, match="outside a transaction"):
        log.producer().send_positions(worker, worker.positions())


def test_transactions_neither_nest_nor_swallow_records_sent_before(place, log, topic):
    producer = log.producer()
    with pytest.raises(LogError, match="inside a transaction"):
        with producer.transaction(), producer.transaction():
            pass
    producer.send(topic, b"before")
    with pytest.raises(LogError, match="flush them first"):
        with producer.transaction():
            pass
    producer.flush()
    assert values_of(place, topic, 1) == [b"before"]


def test_consume_and_produce_in_transactions_takes_every_record_once(place, log, topic, source):
    randomness = random.Random(3)
    num_crashes, group = 0, place.patient_group("g")
    is_done = False
    while not is_done:
        consumer, producer = log.consumer(group=group), log.producer()
        consumer.subscribe([source])
        try:
            while not is_done:
                records = consumer.poll(2, timeout_ms=1_000)
                with producer.transaction():
                    for record in records:
                        producer.send(topic, record.value, partition=record.partition)
                    producer.send_positions(consumer, consumer.positions())
                    if num_crashes < 5 and records and randomness.random() < 0.6:
                        raise Crash
                done = consumer.committed([Partition(source, p) for p in range(4)])
                is_done = sum(done.values()) == 16
        except Crash:
            num_crashes += 1
        finally:
            consumer.close()
    assert num_crashes == 5
    assert values_of(place, topic, 16) == sorted(b"%d" % i for i in range(16))
