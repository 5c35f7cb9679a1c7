"""The trainer's lease is kept, and its process seen alive, while its thread is busy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from training_feed import TOPICS

from streamrft.consumers.lease import LeaseKeeper
from streamrft.schemas import codec
from streamrft.schemas.errors import Fenced, Timeout
from streamrft.schemas.events import Heartbeat
from streamrft.streams.log import Partition, open_log, topic_specs
from streamrft.streams.process import Process

TTL_MS = 300


@pytest.fixture
def log(tmp_path: Path):
    made = open_log(f"sqlite:///{tmp_path / 'log.db'}")
    made.ensure_topics(topic_specs(TOPICS))
    yield made
    made.close()


def keeper(log) -> LeaseKeeper:
    process = Process(log, TOPICS, name="trainer", role="trainer")
    lease = log.acquire("trainer", owner="trainer", ttl_ms=TTL_MS, timeout_ms=0)
    return LeaseKeeper(process, lease)


def test_lease_outlives_its_time_while_the_owner_is_busy(log):
    other = log.reopen()
    with keeper(log) as kept:
        time.sleep(3 * TTL_MS / 1000)
        with pytest.raises(Timeout):
            other.acquire("trainer", owner="other", ttl_ms=TTL_MS, timeout_ms=0)
        kept.check()
        kept.prove()
    other.acquire("trainer", owner="other", ttl_ms=TTL_MS, timeout_ms=0)
    other.close()


def test_lost_lease_is_known_before_the_next_write(log):
    with keeper(log) as kept:
        log.release(kept.lease)
        log.acquire("trainer", owner="other", ttl_ms=60_000, timeout_ms=0)
        with pytest.raises(Fenced, match="other"):
            kept.prove()
        time.sleep(2 * TTL_MS / 1000)
        with pytest.raises(Fenced, match="other"):
            kept.check()
    with pytest.raises(Timeout):
        log.acquire("trainer", owner="third", ttl_ms=TTL_MS, timeout_ms=0)


def test_busy_owner_is_seen_alive(log):
    name = TOPICS.name("heartbeats")
    consumer = log.consumer()
    consumer.assign({Partition(name, 0): 0})
    with keeper(log) as kept, kept.working():
        time.sleep(2 * TTL_MS / 1000)
    beats = [codec.decode(r.value, Heartbeat) for r in consumer.poll()]
    assert {(b.process, b.state) for b in beats} == {("trainer", "alive")}
    assert len(beats) > 1, "one from the owner, the others from the keeper"
