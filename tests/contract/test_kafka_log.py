"""What the log on Kafka promises beyond the port: sizes that agree, holes, names, errors."""

import os
import sys
import time

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from log_process import read, wait_for

from streamrft.schemas.errors import (
    ConfigError,
    EventTooLarge,
    Fenced,
    LogError,
    LogUnavailable,
    MissingExtra,
    OffsetOutOfRange,
    UnknownTopic,
)
from streamrft.streams.kafka.membership import Membership
from streamrft.streams.kafka.options import Options
from streamrft.streams.log import Limits, Partition, Position, TopicSpec, open_log
from streamrft.streams.reading import read_to_end

NOBODY = "kafka://127.0.0.1:1"


def settings_of(place, topic):
    """What the broker keeps of a topic's properties."""
    admin = AdminClient({"bootstrap.servers": place.url.removeprefix("kafka://")})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result(60)
    return {name: entry.value for name, entry in found.items()}


# --- sizes


def test_largest_event_passes_producer_topic_and_consumer_although_nothing_shrinks_it(place, log):
    topic = place.create(log, "large", 1)
    values = [os.urandom(8 * 2**20) for _ in range(3)]
    producer = log.producer()
    for value in values:
        producer.send(topic, value, key=b"k" * 1_000, headers=[("traceparent", b"x" * 1_000)])
    positions = producer.flush()
    assert [r.value for r in log.read_at(positions)] == values
    with producer.transaction():
        producer.send(topic, values[0], key=b"k")
    with pytest.raises(EventTooLarge, match="8,388,609 bytes encoded, the limit is 8,388,608"):
        producer.send(topic, b"x" * (8 * 2**20 + 1))


def test_many_records_that_nothing_shrinks_fit_a_topic_with_a_small_limit(place, log):
    topic = place.create(log, "small", 1, max_event_bytes=10_000)
    producer = log.producer()
    for _ in range(1_000):
        producer.send(topic, os.urandom(10_000))
    assert len(producer.flush()) == 1_000


def test_record_whose_key_is_too_large_is_refused_and_the_next_one_written(place, log):
    topic = place.create(log, "keys", 1, max_event_bytes=100)
    producer = log.producer()
    for size_bytes in (3 * 2**20, 12 * 2**20):  # refused by the broker, by the client
        producer.send(topic, b"v", key=os.urandom(size_bytes))
        with pytest.raises(EventTooLarge, match="keys.*with key and headers"):
            producer.flush()
        with pytest.raises(EventTooLarge, match="keys"):
            with producer.transaction():
                producer.send(topic, b"v", key=os.urandom(size_bytes))
        producer.send(topic, b"v", key=b"k")
        assert len(producer.flush()) == 1


def test_records_that_are_not_acknowledged_in_time_are_kept_for_the_next_flush(place, log):
    topic = place.create(log, "slow", 1)
    producer = log.producer()
    producer.send(topic, b"v")
    with pytest.raises(LogUnavailable, match=r"slow\[0\].*: not acknowledged in time\."):
        producer.flush(0)
    assert len(producer.flush()) == 1


def test_topics_are_made_as_the_options_and_limits_say(place):
    log = place.open(options={"replication": "1", "topic.min.insync.replicas": "1"})
    topic = place.create(log, "made", 1, retention_ms=8_000_000, max_event_bytes=5 * 2**20)
    found = settings_of(place, topic)
    assert int(found["max.message.bytes"]) == 5 * 2**20 + 2**20
    assert found["retention.ms"] == "8000000" and found["segment.ms"] == "1000000"
    assert found["cleanup.policy"] == "delete" and found["compression.type"] == "producer"
    with pytest.raises(LogError, match=r"wide: .*[Rr]eplication"):
        place.create(place.open(options={"replication": "3"}), "wide", 1)


def test_producers_are_idempotent_compress_with_zstd_and_agree_with_consumers_on_sizes():
    options = Options.of(NOBODY, Limits(max_event_bytes=60 * 2**20))
    producing, consuming = options.producing, options.consuming
    wanted = {"enable.idempotence": "true", "acks": "all", "compression.type": "zstd"}
    assert producing.items() >= wanted.items()
    largest = int(producing["message.max.bytes"])
    assert 60 * 2**20 < largest <= int(consuming["fetch.max.bytes"])
    assert int(consuming["fetch.max.bytes"]) + 512 < int(consuming["receive.message.max.bytes"])
    other = Options.of(NOBODY, Limits(options={"compression.type": "lz4"}))
    assert "compression.type" not in other.producing and other.base["compression.type"] == "lz4"


def test_members_beat_as_often_as_the_options_say_or_three_times_a_session(place):
    for given, expected in (({"heartbeat.interval.ms": "250"}, "250"), ({}, "2000")):
        log = place.open(options={"group.protocol": "classic", **given}, session_timeout_ms=6_000)
        member = Membership(log._cluster, None, "g", "m", ("t",), (None, None))
        found = {**log._cluster.options.base, **member._settings()}
        assert str(found["heartbeat.interval.ms"]) == expected


# --- holes


def test_positions_go_past_what_a_transaction_leaves_behind(log, topic):
    partition = Partition(topic, 0)
    producer = log.producer()
    for value in (b"a", b"b"):
        with producer.transaction():
            producer.send(topic, value, partition=0)
    # the marker of a commit is written a moment after its acknowledgement
    wait_for(lambda: log.end_offsets([partition])[partition] == 4)
    end = 4
    consumer = log.consumer()
    consumer.assign({partition: 0})
    assert [r.value for r in read(consumer, 2)] == [b"a", b"b"]
    wait_for(lambda: consumer.poll(timeout_ms=50) == [] and consumer.positions()[partition] == end)
    assert [r.value for r in read_to_end(log, {partition: 0})] == [b"a", b"b"]
    with pytest.raises(OffsetOutOfRange, match=r"\[0\]@1: there is a hole"):
        log.read_at([Position(topic, 0, 1)])


def test_poll_ends_early_when_only_a_hole_was_passed(log, topic):
    partition = Partition(topic, 0)
    consumer = log.consumer()
    consumer.assign({partition: 0})
    producer = log.producer()
    with producer.transaction():
        producer.send(topic, b"v", partition=0)
    read(consumer, 1)
    began = time.monotonic()
    while consumer.positions()[partition] < 2:
        consumer.poll(timeout_ms=60_000)
    assert time.monotonic() - began < 50


def test_records_of_a_fenced_flush_are_read_at_once_by_their_positions(place, log, topic):
    lease = log.acquire(place.name("role"), owner="me", ttl_ms=10_000, timeout_ms=0)
    producer = log.producer(fence=lease)
    for i in range(20):
        producer.send(topic, b"%d" % i, partition=0)
        (position,) = producer.flush()
        assert log.read_at([position])[0].value == b"%d" % i


def test_changelog_stays_short_as_the_topic_is_made_without_options(log, place):
    """The newest segment is never compacted, so with the brokers' 1 GiB or week none would be."""
    num_keys, num_writes = 16_000, 6
    topic = place.create(log, "state", 1, cleanup="compact")
    partition, producer = Partition(topic, 0), log.producer()
    states = os.urandom(num_keys * 1_000)
    for n in range(num_writes):
        for i in range(num_keys):
            value = b"%d" % n + states[i * 1_000 : (i + 1) * 1_000]
            producer.send(topic, value, key=b"group.%d" % i, partition=0)
        producer.flush()
    records = []

    def is_short():
        records[:] = read_to_end(log, {partition: 0})
        return len(records) < 3 * num_keys

    wait_for(is_short)
    assert {r.key for r in records} == {b"group.%d" % i for i in range(num_keys)}
    assert all(r.value[:1] == b"5" for r in records[-num_keys:])


# --- who writes


def test_restarted_writer_ends_the_transactions_of_its_predecessor(place, topic):
    writers = []
    for _ in range(2):
        log = place.open()
        log.consumer(group=place.name("join"), member="join-0")
        writers.append(log.producer())
        with writers[-1].transaction():
            writers[-1].send(topic, b"%d" % len(writers), partition=0)
    with pytest.raises(Fenced):
        with writers[0].transaction():
            writers[0].send(topic, b"paused", partition=0)
    with writers[1].transaction():
        writers[1].send(topic, b"3", partition=0)
    log = place.open()
    assert [r.value for r in read_to_end(log, {Partition(topic, 0): 0})] == [b"1", b"2", b"3"]


def test_lease_of_another_connection_cannot_be_written_under(place, log):
    lease = log.acquire(place.name("role"), owner="me", ttl_ms=10_000, timeout_ms=0)
    with pytest.raises(LogError, match="only the connection that acquired"):
        place.open().producer(fence=lease)


def test_second_living_member_of_one_name_ends_the_first_with_a_clear_error(place, topic):
    place.options["group.protocol"] = "classic"
    consumers = [place.open().consumer(group=place.name("g"), member="same") for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe([topic])
        wait_for(lambda c=consumer: c.poll(timeout_ms=20) is not None and c.assignment())
    with pytest.raises(LogError, match="another living process is member 'same'"):
        wait_for(lambda: consumers[0].poll(timeout_ms=50))


# --- what is refused


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kafka://", "write kafka://host:9092"),
        ("kafka://host:9092/topic", "nothing behind it"),
        ("kafka://host:9092,other:70000", "port '70000' in .*; 1 to 65535 is allowed"),
        ("kafka://host:http", "port 'http'"),
        ("kafka://me:secret@host:9092", "STREAMRFT_KAFKA_USERNAME"),
    ],
)
def test_url_that_is_no_list_of_brokers_is_a_configuration_error(url, words):
    with pytest.raises(ConfigError, match=words):
        open_log(url)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("acks", "1", "its promises rest on it"),
        ("replication", "many", "a whole number is needed"),
        ("linger.msec", "5", "No such configuration property.*CONFIGURATION.md"),
        ("linger.ms", "soon", "Invalid value"),
        ("security.protocol", "SSH", "security.protocol"),
    ],
)
def test_option_that_cannot_be_is_a_configuration_error(option, value, words):
    with pytest.raises(ConfigError, match=f"options.*{words}"):
        open_log(NOBODY, Limits(options={option: value})).producer().send("t", b"v")


def test_no_broker_is_said_with_its_address_within_the_time_given():
    began = time.monotonic()
    with pytest.raises(
        LogUnavailable, match=r"no broker answers at 127\.0\.0\.1:\d+ within 0\.5 s"
    ):
        open_log(NOBODY, Limits(options={"connect_timeout_ms": "500"}))
    assert time.monotonic() - began < 9, "what it gives unless told"


def test_missing_client_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra, match=r'pip install "streamrft\[kafka\]"'):
        open_log(NOBODY)


def test_missing_topic_and_wrong_partition_counts_are_named(place, log, topic):
    with pytest.raises(UnknownTopic, match=r"nowhere.*ensure_topics"):
        log.end_offsets([Partition("nowhere", 0)])
    with pytest.raises(UnknownTopic, match=r"\[7\]: has partitions 0\.\.3"):
        log.offsets_at([Partition(topic, 7)], 0)
    with pytest.raises(LogError, match=r"exists with 4 partitions.*asked for 8"):
        log.ensure_topics([TopicSpec(topic, 8)])


# --- topics that somebody else made


def test_foreign_topic_is_read_as_it_is_and_altered_where_it_differs(place, log):
    admin = AdminClient({"bootstrap.servers": place.url.removeprefix("kafka://")})
    name = place.name("foreign")
    config = {"cleanup.policy": "compact,delete", "retention.bytes": "1000000"}
    (future,) = admin.create_topics([NewTopic(name, 2, 1, config=config)]).values()
    future.result(60)
    state = log.topic_states([name])[name]
    assert state.num_partitions == 2 and state.replication == 1
    assert state.settings["cleanup.policy"] == "compact,delete"
    assert state.settings["retention.ms"] == "604800000"  # the broker's default, a week
    assert state.settings["max.message.bytes"] == "1048588"
    log.alter_topic(name, settings={"cleanup.policy": "delete", "retention.ms": "-1"})
    spec = place.open().describe([name])[name].spec
    assert (spec.cleanup, spec.retention_ms) == ("delete", None)
    assert settings_of(place, name)["retention.bytes"] == "1000000"


def test_property_of_the_options_outlasts_a_later_start(place):
    log = place.open(options={"topic.retention.ms": "7200000"})
    name = place.create(log, "held", 1, retention_ms=3_600_000, max_event_bytes=1_000)
    place.create(log, "held", 1, retention_ms=3_600_000, max_event_bytes=2_000)
    assert log.describe([name])[name].spec.retention_ms == 7_200_000
    assert log.describe([name])[name].spec.max_event_bytes == 2_000
