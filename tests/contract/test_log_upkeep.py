"""Retention and compaction: what leaves a topic by itself, and what readers then see."""

import random
import time

import pytest
from log_process import DEADLINE_S, read, wait_for

from streamrft.schemas.errors import LogError, OffsetOutOfRange
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Partition, Position

HOUR_MS = 3_600_000


@pytest.fixture
def kept_an_hour(place, log):
    return place.create(log, "hours", 1, retention_ms=HOUR_MS)


@pytest.fixture
def compacted(place):
    return place.create(place.open(options=place.compacts_soon), "state", 2, cleanup="compact")


@pytest.fixture
def short_lived(place):
    """A log on which tombstones leave at the next compaction, and a topic on it."""
    log = place.open(options=place.compacts_soon | place.forgets_tombstones)
    return log, place.create(log, "state", 2, cleanup="compact")


def append(log, topic, num_records, *, timestamp_ms=None):
    producer = log.producer()
    for i in range(num_records):
        producer.send(topic, b"%d" % i, partition=0, timestamp_ms=timestamp_ms)
    producer.flush()


def put(producer, topic, states):
    for key, value in states:
        producer.send(topic, value, key=key)
    producer.flush()


def read_all(log, topic, num_partitions):
    partitions = [Partition(topic, p) for p in range(num_partitions)]
    ends = log.end_offsets(partitions)
    consumer = log.consumer()
    consumer.assign({p: log.describe([topic])[topic].begin[p.partition] for p in partitions})
    records = []
    wait_for(lambda: records.extend(consumer.poll(timeout_ms=20)) or consumer.positions() == ends)
    return records


def last_values(records):
    return {r.key: r.value for r in sorted(records, key=lambda r: r.position)}


def test_records_older_than_the_retention_leave_and_the_young_stay(place, log, kept_an_hour):
    append(log, kept_an_hour, 2_500, timestamp_ms=now_ms() - 2 * HOUR_MS)
    append(log, kept_an_hour, 5)
    append(place.open(), kept_an_hour, 5)
    wait_for(lambda: append(log, kept_an_hour, 1) or begin(log, kept_an_hour) == 2_500)
    assert [r.offset for r in read_all(log, kept_an_hour, 1)][:2] == [2_500, 2_501]


def begin(log, topic):
    return log.describe([topic])[topic].begin[0]


def test_reading_what_retention_deleted_is_out_of_range(log, kept_an_hour):
    append(log, kept_an_hour, 5, timestamp_ms=now_ms() - 2 * HOUR_MS)
    wait_for(lambda: append(log, kept_an_hour, 1) or begin(log, kept_an_hour) == 5)
    consumer = log.consumer()
    consumer.assign({Partition(kept_an_hour, 0): 2})
    with pytest.raises(OffsetOutOfRange, match=r"\[0\]@2: the log keeps 5 to"):
        consumer.poll(timeout_ms=100)
    with pytest.raises(OffsetOutOfRange, match=r"\[0\]@2"):
        log.read_at([Position(kept_an_hour, 0, 2)])


def test_new_group_begins_at_the_first_kept_record(place, log, kept_an_hour):
    append(log, kept_an_hour, 5, timestamp_ms=now_ms() - 2 * HOUR_MS)
    wait_for(lambda: append(log, kept_an_hour, 1) or begin(log, kept_an_hour) == 5)
    consumer = log.consumer(group=place.name("g"))
    consumer.subscribe([kept_an_hour])
    assert read(consumer, 1)[0].offset == 5


def test_topic_without_retention_keeps_everything(log, topic):
    append(log, topic, 10, timestamp_ms=1)
    append(log, topic, 10)
    assert begin(log, topic) == 0
    assert len(read_all(log, topic, 4)) == 20


def test_compaction_keeps_the_last_value_of_each_key_and_leaves_holes(log, compacted):
    randomness = random.Random(1)
    producer = log.producer()
    written = []

    def is_compacted():
        for _ in range(20):
            keys = [b"group.%d" % randomness.randrange(50) for _ in range(100)]
            written.extend((key, b"%d" % (len(written) + i)) for i, key in enumerate(keys))
            put(producer, compacted, written[-100:])
        records[:] = read_all(log, compacted, 2)
        assert last_values(records) == dict(written)
        return len(records) < len(written) // 2

    records = []
    wait_for(is_compacted)
    offsets = [r.offset for r in records if r.partition == 0]
    assert offsets == sorted(set(offsets)) and offsets[-1] + 1 > len(offsets)


def test_reader_in_the_middle_of_a_compacted_topic_goes_on(log, compacted):
    producer = log.producer()
    put(producer, compacted, [(b"k", b"first"), (b"k", b"second")])
    consumer = log.consumer()
    partition = Partition(compacted, producer_partition(log, compacted))
    consumer.assign({partition: 1})
    num = write_until_compacted(log, compacted, lambda n: [(b"k", b"%d" % n)] * 1_000)
    records = []
    wait_for(
        lambda: (
            records.extend(consumer.poll(timeout_ms=20))
            or {r.value for r in records[-1:]} == {b"%d" % num}
        )
    )
    offsets = [r.offset for r in records]
    assert offsets[0] >= 1 and offsets == sorted(set(offsets))
    with pytest.raises(OffsetOutOfRange):
        log.read_at([Position(*partition, 0)])


def write_until_compacted(log, topic, states, is_short=None):
    """Write `states(n)` for rising n until the topic holds half of that; the last n."""
    producer, written, num = log.producer(), 0, 0
    deadline = time.monotonic() + DEADLINE_S
    is_short = is_short or (lambda records: len(records) < written // 2)
    records = []
    while not (num >= 5 and is_short(records)):
        num += 1
        assert time.monotonic() < deadline, f"{written} records written, {len(records)} kept"
        put(producer, topic, states(num))
        written += len(states(num))
        records = read_all(log, topic, 2)
    return num


def producer_partition(log, topic):
    ends = log.describe([topic])[topic].end
    return max(ends, key=lambda p: ends[p])


def many(num):
    """More of one key, and one more value of many."""
    kept = [(b"kept", b"%d.%d" % (num, i)) for i in range(1_000)]
    return kept + [(b"kept.%d" % i, b"%d" % num) for i in range(1_000)]


def test_tombstone_removes_its_key_and_later_itself(short_lived):
    log, topic = short_lived
    producer = log.producer()
    put(producer, topic, [(b"gone.%d" % i, b"v") for i in range(100)])
    put(producer, topic, [(b"gone.%d" % i, None) for i in range(100)])
    left = {b"kept"} | {b"kept.%d" % i for i in range(1_000)}
    write_until_compacted(log, topic, many, lambda records: {r.key for r in records} == left)
    assert {r.key for r in read_all(log, topic, 2)} == left


def test_tombstone_is_seen_by_readers_for_a_day(log, compacted):
    producer = log.producer()
    put(producer, compacted, [(b"gone", b"v"), (b"gone", None)])
    num = write_until_compacted(log, compacted, many)
    records = read_all(log, compacted, 2)
    assert [r.value for r in records if r.key == b"gone"] == [None]
    assert last_values(records)[b"kept.0"] == b"%d" % num


def test_compacted_topic_refuses_a_record_without_key(log, compacted):
    with pytest.raises(LogError, match="send a key"):
        log.producer().send(compacted, b"v")
