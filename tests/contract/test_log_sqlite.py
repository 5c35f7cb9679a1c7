"""What the embedded log promises beyond the port: its file, its waits, its members."""

import sqlite3
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from log_process import read, wait_for

from streamrft.schemas.errors import ConfigError, Fenced, LogError, LogUnavailable
from streamrft.streams.log import Limits, Partition, TopicSpec, open_log
from streamrft.streams.reading import read_to_end
from streamrft.streams.sqlite.store import machine_ms


@pytest.fixture
def group(place):
    return place.name("group")


def append(log, topic, num_records, partition=0):
    producer = log.producer()
    for i in range(num_records):
        producer.send(topic, b"%d" % i, partition=partition)
    producer.flush()


def join(consumer, topic, partitions):
    consumer.subscribe([topic])
    wait_for(lambda: consumer.poll(0) is not None and consumer.assignment() == partitions)


def test_relative_and_absolute_urls_name_the_file_and_make_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_log("sqlite:///runs/a/log.db").close()
    open_log(f"sqlite:///{tmp_path}/runs/b/log.db").close()
    assert (tmp_path / "runs/a/log.db").is_file() and (tmp_path / "runs/b/log.db").is_file()


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite://log.db", "sqlite:log.db"])
def test_url_without_a_path_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match="write sqlite:///path/log.db"):
        open_log(url)


def test_unknown_option_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="linger.ms.*known are busy_timeout_ms"):
        open_log(f"sqlite:///{tmp_path}/log.db", Limits(options={"linger.ms": "5"}))


def test_a_log_that_has_no_room_to_be_opened_is_not_called_another_file(tmp_path):
    open_log(f"sqlite:///{tmp_path}/log.db").close()
    script = (
        "import resource, sys; from streamrft.streams.log import open_log\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "open_log(sys.argv[1])"
    )
    words = [sys.executable, "-c", script, f"sqlite:///{tmp_path}/log.db"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("disk I/O error. Look whether its disk is full or gone.\n")


def test_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "log.db"
    path.write_bytes(b"tasks: 1\n" * 1_000)
    with pytest.raises(LogError, match="is no streamrft log"):
        open_log(f"sqlite:///{path}")
    assert path.read_bytes() == b"tasks: 1\n" * 1_000


def test_other_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "log.db"
    with sqlite3.connect(path) as db:
        db.execute("create table theirs(x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LogError, match="another program's SQLite file"):
        open_log(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_log_of_another_version_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    open_log(url).close()
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("pragma user_version=99")
    db.close()
    with pytest.raises(LogError, match="log format 99"):
        open_log(url)


def test_folder_that_cannot_be_made_is_a_log_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LogError, match="file/log.db: cannot be opened .* Look at the rights"):
        open_log(f"sqlite:///{tmp_path}/file/log.db")


def test_many_threads_may_create_the_same_file_at_once(tmp_path):
    errors = []

    def create():
        try:
            log = open_log(f"sqlite:///{tmp_path}/log.db")
            log.ensure_topics([TopicSpec("topic", 4)])
            append(log, "topic", 1)
            log.close()
        except LogError as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    log = open_log(f"sqlite:///{tmp_path}/log.db")
    assert log.end_offsets([Partition("topic", 0)]) == {Partition("topic", 0): 8}
    log.close()


def test_records_are_durable_and_in_one_file(log, place):
    db = sqlite3.connect(place.url.removeprefix("sqlite:///"))
    assert db.execute("pragma journal_mode").fetchone() == ("wal",)
    db.close()
    assert log._store.rows("pragma synchronous") == [(2,)]


def test_locked_file_is_retriable_and_the_records_can_be_flushed_again(place, topic):
    log = place.open(options={"busy_timeout_ms": "50"})
    db = sqlite3.connect(place.url.removeprefix("sqlite:///"), isolation_level=None)
    db.execute("begin immediate")
    producer = log.producer()
    producer.send(topic, b"v", partition=0)
    with pytest.raises(LogUnavailable, match="locked by another process for over 0.05 s") as caught:
        producer.flush(timeout_ms=50)
    assert caught.value.retriable
    with pytest.raises(LogUnavailable):
        log.acquire("role", owner="a", ttl_ms=1_000, timeout_ms=0)
    db.execute("commit")
    db.close()
    assert len(producer.flush()) == 1


def test_compacted_partition_may_end_in_a_hole(place):
    log = place.open(options={"tombstone_ms": "0"})
    partition = Partition(place.create(log, "state", 1, cleanup="compact"), 0)
    producer = log.producer()
    for value in [b"%d" % i for i in range(999)] + [None]:
        producer.send(partition.topic, value, key=b"k")
    producer.flush()
    assert log.end_offsets([partition]) == {partition: 1_000}
    begin = log.describe([partition.topic])[partition.topic].begin[0]
    assert list(read_to_end(log, {partition: begin})) == []
    producer.send(partition.topic, b"after", key=b"k")
    producer.flush()
    assert [r.offset for r in read_to_end(log, {partition: begin})] == [1_000]


def test_readers_do_not_wait_for_a_writer(place, log, topic):
    append(log, topic, 3)
    db = sqlite3.connect(place.url.removeprefix("sqlite:///"), isolation_level=None)
    db.execute("begin immediate")
    consumer = log.consumer()
    consumer.assign({Partition(topic, 0): 0})
    assert len(consumer.poll()) == 3
    db.close()


def test_full_disk_is_retriable_and_nothing_is_half_written(log, topic):
    append(log, topic, 1)
    producer = log.producer()
    pages = log._store.rows("pragma page_count")[0][0]
    log._store.rows(f"pragma max_page_count={pages + 2}")
    producer.send(topic, b"x" * 2**20, partition=0)
    with pytest.raises(LogUnavailable, match="the disk is full"):
        producer.flush()
    assert log.end_offsets([Partition(topic, 0)]) == {Partition(topic, 0): 1}
    log._store.rows("pragma max_page_count=1000000")
    assert [at.offset for at in producer.flush()] == [1]


def test_log_belongs_to_the_thread_that_opened_it(log, topic):
    errors = []

    def use():
        try:
            log.end_offsets([Partition(topic, 0)])
        except LogError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=10)
    assert "thread" in errors[0]


def test_idle_reader_costs_less_than_a_fiftieth_of_a_core(place, topic, partitions):
    """The least of several: a busy machine makes the same work dearer."""
    consumer = place.open().consumer(group=place.name("idle"))
    join(consumer, topic, partitions)

    def cost_s():
        before = time.thread_time()
        assert consumer.poll(timeout_ms=1_000) == []
        return time.thread_time() - before

    assert any(cost_s() < 0.02 for _ in range(8))


def test_waiting_reader_sees_a_record_within_25_ms(place, log, topic, partitions, monkeypatch):
    """By the reader's own clock, which goes on when it sleeps and else stands still."""
    now_s, slept = [0.0], []

    def sleep(seconds):
        now_s[0] += seconds
        if now_s[0] >= 1 and not slept:
            slept.append(now_s[0] - 1)
            append(log, topic, 1)
        elif slept:
            slept.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr("streamrft.streams.sqlite.consumer.time", clock)
    consumer = place.open().consumer()
    consumer.assign(dict.fromkeys(partitions, 0))
    assert consumer.poll(timeout_ms=10_000)
    assert sum(slept) < 0.025


def test_poll_of_large_records_is_bounded_in_bytes(log, topic, partitions, monkeypatch):
    monkeypatch.setattr("streamrft.streams.sqlite.consumer._MAX_POLL_BYTES", 1_000)
    producer = log.producer()
    for i in range(12):
        producer.send(topic, b"%03d" % i * 200, partition=i % 2)
    producer.flush()
    consumer = log.consumer()
    consumer.assign(dict.fromkeys(partitions, 0))
    sizes, records = [], []
    while len(records) < 12:
        found = consumer.poll(timeout_ms=1_000)
        assert found
        sizes.append(len(found))
        records += found
    assert max(sizes) == 2
    assert len({r.position for r in records}) == 12


def test_closed_log_leaves_its_groups(place, topic, partitions, group):
    first = place.open(session_timeout_ms=600_000)
    join(first.consumer(group=group), topic, partitions)
    first.close()
    second = place.open().consumer(group=group)
    join(second, topic, partitions)
    assert second.assignment() == partitions


def test_heartbeats_are_not_written_at_every_poll(place, topic, partitions, group):
    log = place.open(session_timeout_ms=600_000)
    consumer = log.consumer(group=group)
    join(consumer, topic, partitions)
    before = log._store.version()
    for _ in range(50):
        consumer.poll(timeout_ms=10)
    assert log._store.version() == before


def test_member_of_the_same_name_replaces_the_older_one(place, topic, group, partitions):
    older, newer = (place.open().consumer(group=group, member="same") for _ in range(2))
    older.subscribe([topic])
    wait_for(lambda: older.poll(timeout_ms=20) == [] and older.assignment() == partitions)
    newer.subscribe([topic])
    wait_for(lambda: newer.poll(timeout_ms=20) == [] and newer.assignment() == partitions)
    with pytest.raises(Fenced):
        older.commit(dict.fromkeys(partitions, 0))
    with pytest.raises(Fenced, match="'same'"):
        wait_for(lambda: older.poll(timeout_ms=20))
    assert newer.poll() == [] and newer.assignment() == partitions


def test_member_asking_for_other_topics_than_its_group_is_refused(place, log, topic, group):
    other = place.create(log, "other")
    first, second = (place.open().consumer(group=group) for _ in range(2))
    first.subscribe([topic])
    first.poll()
    second.subscribe([other])
    with pytest.raises(LogError, match="subscribe to the same topics"):
        second.poll()


def test_commits_keep_a_member_alive_between_polls(
    place, log, topic, group, partitions, monkeypatch
):
    """Long work on what one poll brought: commits show that the member lives."""
    now_ms = [machine_ms()]
    for module in ("group", "roles"):
        monkeypatch.setattr(f"streamrft.streams.sqlite.{module}.machine_ms", lambda: now_ms[0])
    monkeypatch.setattr("streamrft.streams.sqlite.group._LOOK_INTERVAL_S", 0)
    for p in range(4):
        append(log, topic, 2, p)
    busy, other = (place.open(session_timeout_ms=1_000).consumer(group=group) for _ in range(2))
    busy.subscribe([topic])
    read(busy, 8)
    other.subscribe([topic])
    for _ in range(10):
        now_ms[0] += 400
        busy.commit({partitions[0]: 1})
        other.poll()
        assert other.assignment() == []
    now_ms[0] += 1_000
    other.poll()
    assert other.assignment() == partitions
