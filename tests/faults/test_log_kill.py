"""The embedded log under kill -9 and SIGSTOP: what was acknowledged is there, once, in order."""

import json
import random
import time
from pathlib import Path

import pytest
from log_process import Worker, read, wait_for

from streamrft.streams.log import Limits, Partition, TopicSpec, open_log

SESSION_MS = 1_000
PARTITIONS = [Partition("topic", p) for p in range(4)]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture
def log(url):
    log = open_log(url, Limits(session_timeout_ms=SESSION_MS))
    log.ensure_topics([TopicSpec("topic", 4)])
    yield log
    log.close()


def everything(log):
    """Records of the topic, each partition checked to be without hole or repeat."""
    ends = log.end_offsets(PARTITIONS)
    consumer = log.consumer()
    consumer.assign(dict.fromkeys(PARTITIONS, 0))
    records = read(consumer, sum(ends.values()))
    for partition, end in ends.items():
        offsets = [r.offset for r in records if r.partition == partition.partition]
        assert offsets == list(range(end))
    return records


def acknowledged(side_file: Path):
    """Whole lines of the side file, if it is there; the writer may have died within the last."""
    if not side_file.exists():
        return []
    lines = side_file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("seed", range(3))
def test_acknowledged_records_survive_writers_killed_at_random_times(url, log, tmp_path, seed):
    randomness = random.Random(seed)
    sides = [tmp_path / f"{n}.jsonl" for n in range(6)]
    for n in range(0, 6, 2):
        pair = [
            Worker(url, SESSION_MS, "writer", "topic", f"{i}", str(sides[i])) for i in (n, n + 1)
        ]
        with pair[0] as one, pair[1] as other:
            wait_for(lambda at=n: all(len(acknowledged(s)) > 20 for s in sides[at : at + 2]))
            time.sleep(randomness.uniform(0.0, 0.1))
            one.kill()
            time.sleep(randomness.uniform(0.0, 0.1))
            other.kill()
    found = {(r.partition, r.offset): r for r in everything(log)}
    num_acknowledged = 0
    for side in sides:
        for text, (topic, partition, offset) in acknowledged(side):
            record = found[partition, offset]
            assert record.key == text.encode() and record.topic == topic
            assert (record.value or b"").startswith(text.encode())
            num_acknowledged += 1
    assert num_acknowledged > 6 * 20
    keys = [r.key for r in found.values()]
    assert len(set(keys)) == len(keys)


def test_log_goes_on_after_a_writer_was_killed(url, log, tmp_path):
    with Worker(url, SESSION_MS, "writer", "topic", "w", str(tmp_path / "side")) as writer:
        writer.hear("ready")
        wait_for(lambda: sum(log.end_offsets(PARTITIONS).values()) > 100)
        writer.kill()
    producer = log.producer()
    producer.send("topic", b"after", key=b"after")
    (position,) = producer.flush(timeout_ms=60_000)
    assert log.read_at([position])[0].value == b"after"
    assert everything(log)


def test_paused_member_cannot_commit_after_its_successor(url, log):
    producer = log.producer()
    for p in range(4):
        producer.send("topic", b"v", partition=p)
    producer.flush()
    with Worker(url, SESSION_MS, "hesitant_member", "group", "paused", "topic") as paused:
        assert len(paused.hear("holding")) == 4
        paused.stop()
        successor = log.consumer(group="group", member="successor")
        successor.subscribe(["topic"])
        assert len(read(successor, 4)) == 4
        successor.commit(dict.fromkeys(PARTITIONS, 1))
        paused.cont()
        paused.say()
        assert "'paused'" in paused.hear("fenced")
        assert successor.committed(PARTITIONS) == dict.fromkeys(PARTITIONS, 1)
        successor.commit(dict.fromkeys(PARTITIONS, 1))
        wait_for(lambda: comes_back(paused, successor))


def comes_back(paused, successor):
    """Whether the member that was paused shares the group again."""
    paused.say()
    mine = paused.hear("assignment")
    successor.poll(timeout_ms=20)
    return len(mine) == len(successor.assignment()) == 2


def test_member_killed_holding_records_leaves_them_to_its_successor_at_once(url, log):
    producer = log.producer()
    producer.send("topic", b"v", partition=0)
    producer.flush()
    slow = open_log(url, Limits(session_timeout_ms=600_000))
    with Worker(url, 600_000, "hesitant_member", "group", "killed", "topic") as killed:
        killed.hear("holding")
        killed.kill()
        successor = slow.consumer(group="group", member="successor")
        successor.subscribe(["topic"])
        assert [r.value for r in read(successor, 1, timeout_s=60)] == [b"v"]
    slow.close()


def test_paused_holder_of_a_role_cannot_publish_after_its_successor(url, log):
    with Worker(url, SESSION_MS, "holder", "trainer", "paused", "500", "topic") as paused:
        epoch = paused.hear("epoch")
        paused.say()
        assert paused.hear("flushed") and paused.hear("transacted")
        paused.stop()
        lease = log.acquire("trainer", owner="successor", ttl_ms=60_000, timeout_ms=60_000)
        assert lease.epoch > epoch
        producer = log.producer(fence=lease)
        producer.send("topic", b"successor")
        producer.flush()
        before = len(everything(log))
        paused.cont()
        paused.say()
        assert "now successor does under" in paused.hear("fenced")
        assert "now successor does under" in paused.hear("fenced")
        assert len(everything(log)) == before
        log.renew(lease)


@pytest.mark.parametrize("seed", range(2))
def test_copiers_killed_and_paused_at_random_copy_every_record_once(url, log, seed):
    randomness = random.Random(seed)
    log.ensure_topics([TopicSpec("copies", 4)])
    producer = log.producer()
    workers = [copier(url, n) for n in range(3)]
    num_sent = 0
    try:
        for _ in range(12):
            for _ in range(200):
                producer.send("topic", b"%d" % num_sent, key=b"%d" % num_sent)
                num_sent += 1
            producer.flush()
            i = randomness.randrange(3)
            if randomness.random() < 0.6:
                workers[i].__exit__()
                workers[i] = copier(url, i)
            else:
                workers[i].stop()
                time.sleep(randomness.uniform(0.0, SESSION_MS / 1000 * 1.5))
                workers[i].cont()
            time.sleep(randomness.uniform(0.0, 0.2))
        copies = [Partition("copies", p) for p in range(4)]
        wait_for(lambda: sum(log.end_offsets(copies).values()) >= num_sent)
    finally:
        for worker in workers:
            worker.__exit__()
    consumer = log.consumer()
    consumer.assign(dict.fromkeys(copies, 0))
    values = [int(r.value or b"") for r in read(consumer, num_sent)]
    assert sorted(values) == list(range(num_sent))


def copier(url, n):
    worker = Worker(url, SESSION_MS, "copier", "copiers", f"copier-{n}", "topic", "copies")
    worker.hear("ready")
    return worker
