"""Kafka under kill -9 and SIGSTOP of clients and of the broker: nothing acknowledged is lost."""

import json
import random
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from log_process import Worker, read, wait_for

from streamrft.schemas.errors import Fenced, LogUnavailable
from streamrft.streams.kafka.writers import Outgoing
from streamrft.streams.log import Limits, Partition, TopicSpec, open_log
from streamrft.streams.reading import begins, read_to_end

SESSION_MS = 1_500
ROUNDS = 6
LIMITS = Limits(session_timeout_ms=SESSION_MS)


@pytest.fixture
def log(kafka_url):
    log = open_log(kafka_url, LIMITS)
    yield log
    log.close()


@pytest.fixture
def prefix():
    return f"faults-{secrets.token_hex(4)}"


def create(log, name):
    log.ensure_topics([TopicSpec(name, 4)])
    return [Partition(name, p) for p in range(4)]


def acknowledged(side_file: Path):
    """Whole lines of the side file; the writer may have died within the last."""
    lines = side_file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def values_of(log, partitions):
    return [r.value or b"" for r in read_to_end(log, dict.fromkeys(partitions, 0))]


def test_paused_holder_of_a_role_cannot_publish_after_its_successor(kafka_url, log, prefix):
    partitions = create(log, f"{prefix}.topic")
    role = f"{prefix}.trainer"
    topic = f"{prefix}.topic"
    with Worker(kafka_url, SESSION_MS, "holder", role, "paused", "500", topic) as paused:
        epoch = paused.hear("epoch")
        paused.say()
        assert paused.hear("flushed") and paused.hear("transacted")
        paused.stop()
        lease = log.acquire(role, owner="successor", ttl_ms=60_000, timeout_ms=60_000)
        assert lease.epoch > epoch
        producer = log.producer(fence=lease)
        producer.send(topic, b"successor")
        producer.flush()
        paused.cont()
        paused.say()
        assert "now successor does under" in paused.hear("fenced")
        assert "now successor does under" in paused.hear("fenced")
        log.renew(lease)
        producer.send(topic, b"successor")
        producer.flush()
    wait_for(lambda: len(values_of(log, partitions)) == 4)
    assert sorted(values_of(log, partitions)) == [b"paused"] * 2 + [b"successor"] * 2


def test_holder_that_passed_its_check_before_the_pause_is_fenced_by_the_broker(log, prefix):
    partitions = create(log, f"{prefix}.topic")
    role = f"{prefix}.trainer"
    other = log.reopen()
    lease = log.acquire(role, owner="old", ttl_ms=200, timeout_ms=0)
    writer = log._roles.writer(lease)  # beyond the check of the lease
    other.acquire(role, owner="new", ttl_ms=60_000, timeout_ms=60_000)
    with pytest.raises(Fenced):
        writer.write([Outgoing(partitions[0].topic, 0, None, b"late", [], 1)])
    assert values_of(other, partitions) == []
    other.close()


def test_holder_that_is_fenced_while_it_hands_its_records_over_is_told_so(log, prefix):
    partitions = create(log, f"{prefix}.topic")
    other = log.reopen()
    old = log.acquire(f"{prefix}.trainer", owner="old", ttl_ms=200, timeout_ms=0)
    new = other.acquire(f"{prefix}.trainer", owner="new", ttl_ms=60_000, timeout_ms=60_000)
    record = Outgoing(partitions[0].topic, 0, None, b"late", [], 1)

    class Slowly(list[Outgoing]):
        def __iter__(self):
            for one in super().__iter__():
                yield one
                time.sleep(0.02)

    with pytest.raises(Fenced):
        log._roles.writer(old).write(Slowly([record] * 100))
    other.renew(new)
    assert values_of(other, partitions) == []
    other.close()


def test_paused_member_cannot_commit_after_its_successor(kafka_url, log, prefix):
    partitions = create(log, f"{prefix}.topic")
    topic, group = f"{prefix}.topic", f"{prefix}.group"
    producer = log.producer()
    for p in range(4):
        producer.send(topic, b"v", partition=p)
    producer.flush()
    with Worker(kafka_url, SESSION_MS, "hesitant_member", group, "paused", topic) as paused:
        paused.hear("holding")
        paused.stop()
        successor = log.consumer(group=group, member="successor")
        successor.subscribe([topic])
        wait_for(lambda: reads_and_commits(successor, partitions))
        paused.cont()
        paused.say()
        assert "'paused'" in paused.hear("fenced")
        assert successor.committed(partitions) == dict.fromkeys(partitions, 1)


def reads_and_commits(member, partitions):
    """False when its own session ended in between, on a machine that stood still."""
    read(member, len(partitions))
    try:
        member.commit(dict.fromkeys(partitions, 1))
    except Fenced:
        return False
    return True


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_copiers_killed_and_paused_at_random_copy_every_record_once(
    kafka_url, log, prefix, protocol
):
    copied = copy_under_faults(kafka_url, log, prefix, protocol)
    assert copied == list(range(200 * ROUNDS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_copiers_copy_every_record_once_over_a_broker_that_dies_too(broker, protocol, seed):
    log = open_log(broker.url, LIMITS)
    told = {"broker": broker, "seed": seed, "rounds": 15}
    copied = copy_under_faults(broker.url, log, "faults", protocol, **told)
    assert copied == list(range(200 * 15))
    log.close()


def copy_under_faults(url, log, prefix, protocol, *, broker=None, seed=0, rounds=ROUNDS):
    """200 numbers a round for three copiers, of which one is killed or paused, or the broker is.

    All that was copied, sorted.
    """
    randomness = random.Random(f"{protocol}{seed}")
    source, target = f"{prefix}.source", f"{prefix}.target"
    create(log, source)
    copies = create(log, target)

    def copier(n):
        words = ("copier", f"{prefix}.copiers", f"copier-{n}", source, target)
        worker = Worker(url, SESSION_MS, *words, options={"group.protocol": protocol})
        worker.hear("ready")
        return worker

    producer = log.producer()
    workers = [copier(n) for n in range(3)]
    num_sent = 0
    try:
        for _ in range(rounds):
            for _ in range(200):
                producer.send(source, b"%d" % num_sent, key=b"%d" % num_sent)
                num_sent += 1
            flush_when_it_is_back(producer)
            i, what = randomness.randrange(3), randomness.random()
            if broker is not None and what < 0.3:
                broker.kill()
                broker.start()
            elif what < 0.7:
                workers[i].__exit__()
                workers[i] = copier(i)
            else:
                workers[i].stop()
                time.sleep(randomness.uniform(0.0, SESSION_MS / 1000 * 1.5))
                workers[i].cont()
        wait_for(lambda: len(values_of(log, copies)) >= num_sent, 120)
        assert [w.process.poll() for w in workers] == [None] * 3
    finally:
        for worker in workers:
            worker.__exit__()
    return sorted(map(int, values_of(log, copies)))


def test_acknowledged_records_survive_a_killed_broker_and_processes_go_on(broker, tmp_path):
    log = open_log(broker.url, LIMITS)
    partitions = create(log, "run.topic")
    lease = log.acquire("run.trainer", owner="me", ttl_ms=60_000, timeout_ms=60_000)
    fenced = log.producer(fence=lease)
    reader = log.consumer()
    reader.assign(dict.fromkeys(partitions, 0))
    side = tmp_path / "side.jsonl"
    with Worker(broker.url, SESSION_MS, "writer", "run.topic", "w", str(side)) as writer:
        writer.hear("ready")
        wait_for(lambda: side.exists() and len(acknowledged(side)) > 100)
        read_before = read(reader, 100)
        broker.kill()
        before = len(acknowledged(side))
        fenced.send("run.topic", b"fenced", partition=0)
        broker.start()
        flush_when_it_is_back(fenced)
        log.renew(lease)
        wait_for(lambda: len(acknowledged(side)) > before + 20)
        writer.kill()
        lines = acknowledged(side)
    found = {(r.partition, r.offset): r for r in read_to_end(log, dict.fromkeys(partitions, 0))}
    for text, (_, partition, offset) in lines:
        assert found[partition, offset].key == text.encode()
    assert [r.value for r in found.values()].count(b"fenced") == 1
    assert len(read_before) + len(read(reader, len(found) - len(read_before))) == len(found)
    log.close()


def test_ends_are_right_or_not_known_while_a_broker_comes_back(broker):
    log = open_log(broker.url, LIMITS)
    partitions = create(log, "topic")
    producer = log.producer()
    for p in range(4):
        producer.send("topic", b"v", partition=p)
    producer.flush()
    told, is_over = [], threading.Event()

    def ask():
        own = open_log(broker.url, LIMITS)
        while not is_over.is_set():
            with suppress(LogUnavailable):
                told.append((own.end_offsets(partitions), begins(own, "topic")))
        own.close()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    wait_for(lambda: told)
    broker.kill()
    broker.start()
    num = len(told)
    wait_for(lambda: len(told) > num + 3)
    is_over.set()
    for asker in askers:
        asker.join(60)
    log.close()
    assert all(ends == dict.fromkeys(partitions, 1) for ends, _ in told)
    assert all(first == dict.fromkeys(partitions, 0) for _, first in told)


def flush_when_it_is_back(producer):
    deadline = time.monotonic() + 120
    while True:
        try:
            producer.flush()
            return
        except LogUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.2)
