"""What a reader of the log promises, on every adapter."""

import time

import pytest
from log_process import read, wait_for

from streamrft.schemas.errors import LogError, OffsetOutOfRange, UnknownTopic
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Partition, Position


def append(log, topic, values, *, partition=0, timestamp_ms=None):
    producer = log.producer()
    for value in values:
        producer.send(topic, value, partition=partition, timestamp_ms=timestamp_ms)
    positions = producer.flush()
    producer.close()
    return positions


@pytest.fixture
def reader(log, partitions):
    consumer = log.consumer()
    consumer.assign(dict.fromkeys(partitions, 0))
    return consumer


def test_records_of_a_partition_come_in_offset_order(log, topic, reader):
    for n in range(5):
        append(log, topic, [b"%d" % (n * 10 + i) for i in range(10)], partition=n % 2)
    records = read(reader, 50)
    for p in (0, 1):
        offsets = [r.offset for r in records if r.partition == p]
        assert offsets == sorted(set(offsets))
    assert {int(r.value or b"") for r in records} == set(range(50))


def test_poll_returns_at_most_max_records(log, topic, reader):
    append(log, topic, [b"v"] * 10)
    sizes = []
    wait_for(lambda: sizes.append(len(reader.poll(3, timeout_ms=1_000))) or sum(sizes) == 10)
    assert max(sizes) <= 3


def test_poll_is_fair_to_every_partition(log, topic, partitions):
    for p in range(4):
        append(log, topic, [b"v"] * 200, partition=p)
    reader = log.consumer()
    reader.assign(dict.fromkeys(partitions, 0))
    for partition in partitions:  # none is still on its way from the log
        others = [p for p in partitions if p != partition]
        reader.pause(others)
        assert [Partition(r.topic, r.partition) for r in reader.poll(1, 60_000)] == [partition]
        reader.resume(others)
    seen = [r.partition for _ in range(8) for r in reader.poll(1, timeout_ms=1_000)]
    assert set(seen) == {0, 1, 2, 3}
    records = read(reader, 100)
    while len({r.partition for r in records}) < 4:
        assert len(records) < 700, "a partition was left to the end"
        records += reader.poll(50, timeout_ms=1_000)


def test_poll_returns_nothing_at_its_deadline(reader):
    """The least of several: the machine itself may be late once."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        assert reader.poll(timeout_ms=200) == []
        took.append(time.monotonic() - began)
    assert 0.15 < min(took) < 2.0
    assert reader.poll() == []


def test_record_appended_by_another_connection_ends_the_wait(place, topic, reader):
    assert reader.poll(timeout_ms=50) == []
    append(place.open(), topic, [b"late"], partition=3)
    began = time.monotonic()
    assert [r.value for r in reader.poll(timeout_ms=60_000)] == [b"late"]
    assert time.monotonic() - began < 50


def test_assignment_and_positions_follow_what_was_read(log, topic, reader, partitions):
    append(log, topic, [b"v"] * 3, partition=1)
    assert reader.assignment() == partitions
    read(reader, 3)
    assert reader.positions() == dict.fromkeys(partitions, 0) | {partitions[1]: 3}


def test_assign_begins_at_the_offset_that_it_names(log, topic):
    append(log, topic, [b"0", b"1", b"2"])
    consumer = log.consumer()
    consumer.assign({Partition(topic, 0): 1})
    assert [r.value for r in read(consumer, 2)] == [b"1", b"2"]
    consumer.assign({Partition(topic, 0): 2})
    assert [r.value for r in read(consumer, 1)] == [b"2"]


def test_seek_reads_again_or_skips(log, topic, reader, partitions):
    append(log, topic, [b"0", b"1", b"2", b"3"])
    read(reader, 4)
    reader.seek(partitions[0], 1)
    assert [r.value for r in read(reader, 3)] == [b"1", b"2", b"3"]
    reader.seek(partitions[0], 3)
    assert [r.value for r in read(reader, 1)] == [b"3"]


def test_seek_of_a_partition_not_assigned_is_an_error(log, topic, partitions):
    consumer = log.consumer()
    consumer.assign({partitions[0]: 0})
    with pytest.raises(LogError, match=r"\[1\]: is not assigned"):
        consumer.seek(partitions[1], 0)


def test_paused_partition_is_left_out_until_resumed(log, topic, reader, partitions):
    reader.pause([partitions[0]])
    append(log, topic, [b"paused"], partition=0)
    append(log, topic, [b"read"], partition=1)
    assert [r.value for r in read(reader, 1)] == [b"read"]
    assert reader.poll(timeout_ms=200) == []
    reader.resume([partitions[0]])
    assert [r.value for r in read(reader, 1)] == [b"paused"]


def test_position_past_the_end_is_out_of_range(log, topic):
    append(log, topic, [b"v"] * 3)
    consumer = log.consumer()
    consumer.assign({Partition(topic, 0): 4})
    with pytest.raises(OffsetOutOfRange, match=r"\[0\]@4"):
        read(consumer, 1)
    consumer.seek(Partition(topic, 0), 3)
    assert consumer.poll(timeout_ms=100) == []


def test_assigning_an_unknown_topic_or_partition_is_an_error(log, topic):
    with pytest.raises(UnknownTopic):
        log.consumer().assign({Partition("nowhere", 0): 0})
    with pytest.raises(UnknownTopic, match=r"\[9\]"):
        log.consumer().assign({Partition(topic, 9): 0})


def test_read_at_returns_exactly_these_records_in_this_order(log, topic):
    positions = []
    for p in range(4):
        positions += append(log, topic, [b"%d.%d" % (p, i) for i in range(20)], partition=p)
    wanted = [positions[i] for i in (79, 3, 41, 3, 0, 60)]
    assert [r.position for r in log.read_at(wanted)] == wanted
    assert log.read_at([]) == []


def test_read_at_a_position_that_is_not_there_is_out_of_range(log, topic):
    append(log, topic, [b"v"])
    with pytest.raises(OffsetOutOfRange, match=r"\[0\]@7"):
        log.read_at([Position(topic, 0, 0), Position(topic, 0, 7)])


def test_end_offsets_lie_one_past_the_last_record(log, topic, partitions):
    append(log, topic, [b"v"] * 3, partition=2)
    ends = log.end_offsets(partitions)
    assert ends == dict.fromkeys(partitions, 0) | {partitions[2]: 3}


def test_removed_topic_is_unknown_to_those_who_knew_it(place, log, topic, reader, partitions):
    assert reader.poll() == []
    place.open().delete_topic(topic)
    # Kafka's leader lets go of its replicas a moment after the topic is no longer listed
    with pytest.raises(UnknownTopic):
        wait_for(lambda: not log.end_offsets(partitions))
    with pytest.raises(UnknownTopic):
        wait_for(lambda: reader.poll(timeout_ms=50))


def test_offsets_at_finds_the_first_record_of_a_time_or_the_end(log, topic, partitions):
    start = now_ms() - 100_000
    for i in range(10):
        append(log, topic, [b"v"], timestamp_ms=start + i * 1_000)
    first = partitions[0]
    assert log.offsets_at([first], start + 3_000) == {first: 3}
    assert log.offsets_at([first], start + 3_001) == {first: 4}
    assert log.offsets_at([first], start - 1) == {first: 0}
    assert log.offsets_at(partitions, start + 60_000) == {first: 10} | dict.fromkeys(
        partitions[1:], 0
    )


def test_positions_are_committed_for_a_group_without_a_lease(place, log, topic, partitions):
    group = place.name("readers")
    consumer = log.consumer(group=group)
    consumer.assign({partitions[0]: 0})
    append(log, topic, [b"v"] * 3)
    read(consumer, 3)
    assert consumer.committed(partitions) == {}
    consumer.commit(consumer.positions())
    assert place.open().consumer(group=group).committed(partitions) == {partitions[0]: 3}
    consumer.commit({partitions[0]: 1})
    assert consumer.committed(partitions) == {partitions[0]: 1}


def test_reader_without_group_can_neither_subscribe_nor_commit(log, topic, reader, partitions):
    with pytest.raises(LogError, match="no group"):
        log.consumer().subscribe([topic])
    with pytest.raises(LogError, match="no group"):
        reader.commit({partitions[0]: 0})
