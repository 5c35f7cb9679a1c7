"""What a producer of the log promises, on every adapter."""

import pytest
from log_process import read

from streamrft.schemas.errors import EventTooLarge, LogError, UnknownTopic
from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams.log import Partition, Position, TopicSpec


def everything(log, topic, num_partitions=4):
    """All records of a topic, by position."""
    partitions = [Partition(topic, p) for p in range(num_partitions)]
    ends = log.end_offsets(partitions)
    consumer = log.consumer()
    consumer.assign(dict.fromkeys(partitions, 0))
    found = {r.position: r for r in read(consumer, 0)}
    while any(consumer.positions()[p] < ends[p] for p in partitions):
        found |= {r.position: r for r in consumer.poll(timeout_ms=100)}
    consumer.close()
    return found


def test_flush_returns_positions_in_the_order_of_send(log, topic):
    producer = log.producer()
    values = [b"%d" % i for i in range(50)]
    for value in values:
        producer.send(topic, value, key=value)
    positions = producer.flush()
    assert [log.read_at([at])[0].value for at in positions] == values
    assert [r.value for r in log.read_at(positions)] == values


def test_offsets_of_a_partition_rise_by_one_across_flushes(log, topic):
    producer = log.producer()
    for n in (3, 1, 5):
        for _ in range(n):
            producer.send(topic, b"v", partition=2)
        producer.flush()
    assert [at.offset for at in sorted(everything(log, topic))] == list(range(9))


def test_nothing_is_visible_before_flush(log, topic):
    producer = log.producer()
    producer.send(topic, b"v", partition=0)
    producer.close()
    assert producer.flush() == []
    assert everything(log, topic) == {}


def test_record_comes_back_as_it_was_sent(log, topic):
    producer = log.producer()
    headers = (("traceparent", b"00-ab"), ("traceparent", b"\x00\xff"), ("empty", b""))
    stamp = now_ms() - 5_000
    producer.send(topic, b"\x00v", key=b"k\xff", partition=1, headers=headers, timestamp_ms=stamp)
    (position,) = producer.flush()
    (record,) = log.read_at([position])
    assert record == (topic, 1, position.offset, stamp, b"k\xff", b"\x00v", headers)
    assert record.position == position


def test_absent_key_value_and_headers_come_back_absent(log, topic):
    producer = log.producer()
    producer.send(topic, None)
    (record,) = log.read_at(producer.flush())
    assert (record.key, record.value, record.headers) == (None, None, ())


def test_empty_value_is_not_absent(log, topic):
    producer = log.producer()
    producer.send(topic, b"", key=b"")
    (record,) = log.read_at(producer.flush())
    assert (record.key, record.value) == (b"", b"")


def test_timestamp_is_the_wall_clock_unless_given(log, topic):
    producer = log.producer()
    before = now_ms()
    producer.send(topic, b"v")
    (record,) = log.read_at(producer.flush())
    assert before <= record.timestamp_ms <= now_ms()


def test_key_decides_the_partition_by_murmur2(log, topic):
    producer = log.producer()
    keys = [f"gsm8k.{n}".encode() for n in range(64)]
    for key in keys:
        producer.send(topic, b"v", key=key)
    assert [at.partition for at in producer.flush()] == [partition_for(key, 4) for key in keys]


def test_murmur2_places_keys_where_the_java_client_does(log, topic):
    # values of org.apache.kafka.common.utils.Utils.murmur2, from its own test
    expected = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    for key, murmur2 in expected.items():
        assert partition_for(key, 4) == (murmur2 & 0x7FFFFFFF) % 4
        producer = log.producer()
        producer.send(topic, b"v", key=key)
        assert producer.flush()[0].partition == (murmur2 & 0x7FFFFFFF) % 4


def test_record_without_key_goes_to_some_partition(log, topic):
    producer = log.producer()
    for _ in range(20):
        producer.send(topic, b"v")
    assert {at.partition for at in producer.flush()} <= set(range(4))
    assert len(everything(log, topic)) == 20


def test_two_producers_never_share_an_offset(place, topic):
    producers = [place.open().producer() for _ in range(2)]
    positions = []
    for _ in range(10):
        for producer in producers:
            producer.send(topic, b"v", partition=0)
            producer.send(topic, b"v", partition=0)
        positions += producers[1].flush() + producers[0].flush()
    assert len(set(positions)) == len(positions) == 40


def test_value_over_the_limit_of_its_topic_is_refused_and_others_go_on(place, log):
    topic = place.create(log, "small", max_event_bytes=100)
    producer = log.producer()
    producer.send(topic, b"x" * 100)
    with pytest.raises(EventTooLarge, match="101 bytes encoded, the limit is 100") as caught:
        producer.send(topic, b"x" * 101)
    assert (caught.value.size_bytes, caught.value.max_bytes) == (101, 100)
    assert len(producer.flush()) == 1


def test_limit_and_retention_of_a_topic_grow_with_the_configuration(place, log):
    topic = place.create(log, "grown", max_event_bytes=100, retention_ms=3_600_000)
    place.create(log, "grown", max_event_bytes=200)
    producer = log.producer()
    producer.send(topic, b"x" * 200)
    assert len(producer.flush()) == 1
    assert log.describe([topic])[topic].spec.retention_ms is None


def test_a_configuration_that_keeps_less_is_told_and_changes_nothing(place, log, caplog):
    topic = place.create(log, "wide", max_event_bytes=200, retention_ms=7_200_000)
    place.create(log, "wide", max_event_bytes=100, retention_ms=3_600_000)
    spec = log.describe([topic])[topic].spec
    assert (spec.max_event_bytes, spec.retention_ms) == (200, 7_200_000)
    assert f"{topic}: keeps more than the configuration asks for" in caplog.text
    caplog.clear()
    place.create(log, "wide", max_event_bytes=300, retention_ms=3_600_000)
    spec = log.describe([topic])[topic].spec
    assert (spec.max_event_bytes, spec.retention_ms) == (300, 7_200_000)


def test_unknown_topic_or_partition_is_refused_at_send(log, topic):
    producer = log.producer()
    with pytest.raises(UnknownTopic, match="nowhere"):
        producer.send("nowhere", b"v")
    with pytest.raises(UnknownTopic, match=r"\[4\]: has partitions 0\.\.3"):
        producer.send(topic, b"v", partition=4)


def test_flush_of_nothing_returns_nothing(log):
    assert log.producer().flush() == []


def test_topics_are_created_once_and_described(place, log):
    spec = TopicSpec(place.name("described"), 2, retention_ms=3_600_000, max_event_bytes=1_000)
    log.ensure_topics([spec])
    log.ensure_topics([spec])
    producer = log.producer()
    producer.send(spec.name, b"v", partition=1)
    producer.flush()
    found = log.describe([spec.name])[spec.name]
    assert found.spec == spec
    assert (dict(found.begin), dict(found.end)) == ({0: 0, 1: 0}, {0: 0, 1: 1})
    assert spec.name in log.describe()


def test_topic_with_another_number_of_partitions_is_an_error(place, log):
    topic = place.create(log, "fixed", 2)
    with pytest.raises(LogError, match="2 partitions.*asked for 3") as raised:
        log.ensure_topics([TopicSpec(topic, 3)])
    assert raised.value.exit_code == 2


def test_describing_an_unknown_topic_is_an_error(place, log):
    with pytest.raises(UnknownTopic, match="nowhere"):
        log.describe([place.name("nowhere")])


def test_deleted_topic_is_gone_with_records_and_positions_and_begins_anew(place, log):
    topic = place.create(log, "deleted", 1)
    producer = log.producer()
    producer.send(topic, b"old")
    producer.flush()
    reader = log.consumer(group=place.name("g"))
    reader.assign({Partition(topic, 0): 0})
    reader.commit({Partition(topic, 0): 1})
    reader.close()
    log.delete_topic(topic)
    log.delete_topic(topic)
    with pytest.raises(UnknownTopic):
        producer.send(topic, b"v")
    place.create(log, "deleted", 1)
    assert log.end_offsets([Partition(topic, 0)]) == {Partition(topic, 0): 0}
    assert log.consumer(group=place.name("g")).committed([Partition(topic, 0)]) == {}
    producer.send(topic, b"new")
    assert producer.flush() == [Position(topic, 0, 0)]


def test_reopened_log_is_another_connection_to_the_same_topics(log, topic):
    other = log.reopen()
    producer = other.producer()
    producer.send(topic, b"v", partition=3)
    (position,) = producer.flush()
    other.close()
    assert log.read_at([position])[0].value == b"v"
