"""The trainer's lease is kept, and its process seen alive, while its thread is busy."""

from __future__ import annotations

from pathlib import Path

import pytest
from topic_events import events_on
from training_feed import TOPICS
from waiting import until

from streamrft.consumers.lease import LeaseKeeper
from streamrft.schemas import codec
from streamrft.schemas.errors import Fenced, LogUnavailable, Timeout
from streamrft.schemas.events import Heartbeat
from streamrft.streams.log import Partition, open_log, topic_specs
from streamrft.streams.process import Process

TTL_MS = 300


@pytest.fixture
def now_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The machine's clock, which stands still unless a test moves it."""
    clock = [1_000_000]
    monkeypatch.setattr("streamrft.streams.sqlite.roles.machine_ms", lambda: clock[0])
    return clock


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


def renewed_ms(log) -> int:
    ((found,),) = log._store.rows("select renewed_ms from roles")
    return found


def test_lease_outlives_its_time_while_the_owner_is_busy(log, now_ms):
    other = log.reopen()
    with keeper(log) as kept:
        for _ in range(5):
            now_ms[0] += TTL_MS - 1
            until(lambda: renewed_ms(log) == now_ms[0], "the keeper's renewal")
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
        with pytest.raises(Fenced, match="other"):
            until(kept.check, "that the keeper found it lost")
    with pytest.raises(Timeout):
        log.acquire("trainer", owner="third", ttl_ms=TTL_MS, timeout_ms=0)


def test_proof_waits_for_a_log_that_is_away_and_says_so(log, monkeypatch: pytest.MonkeyPatch):
    for name in ("BEAT_INTERVAL_S", "_RETRY_S"):
        monkeypatch.setattr(f"streamrft.streams.process.{name}", 0.0)
    renew, away = log.renew, [LogUnavailable("no broker answers")] * 3

    def renew_later(lease) -> None:
        if away:
            raise away.pop()
        renew(lease)

    with keeper(log) as kept, kept.working():
        monkeypatch.setattr(log, "renew", renew_later)
        kept.prove()
    beats = events_on(log, TOPICS, "heartbeats", Heartbeat)
    assert not away and {b.waiting_for for b in beats} == {"", "the log: no broker answers"}


def test_busy_owner_is_seen_alive(log):
    name = TOPICS.name("heartbeats")
    consumer = log.consumer()
    consumer.assign({Partition(name, 0): 0})
    beats: list[Heartbeat] = []

    def hear() -> int:
        beats.extend(codec.decode(r.value, Heartbeat) for r in consumer.poll())
        return len(beats)

    with keeper(log) as kept, kept.working():
        until(lambda: hear() > 1, "one from the owner, the others from the keeper")
    hear()
    assert {(b.process, b.state) for b in beats} == {("trainer", "alive")}
