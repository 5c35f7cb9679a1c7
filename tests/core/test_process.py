"""A process tells how it is and waits for the log, but neither ends its life."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrft.schemas.errors import LogUnavailable, Timeout
from streamrft.schemas.topics import Topics
from streamrft.streams import process as process_module
from streamrft.streams.log import open_log, topic_specs
from streamrft.streams.process import Process, until_answered

TOPICS = Topics("t.process")


@pytest.fixture
def log(tmp_path: Path):
    made = open_log(f"sqlite:///{tmp_path / 'log.db'}")
    made.ensure_topics(topic_specs(TOPICS))
    yield made
    made.close()


def test_a_heartbeat_that_the_log_does_not_take_ends_nothing(
    log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(process_module, "_BEAT_TIMEOUT_MS", 10)
    writer, process = log.reopen(), Process(log, TOPICS, name="p", role="join")
    store = writer._store
    with store.writing():
        process.alive()
    assert "no heartbeat" in caplog.text
    process.ended()
    assert log.describe([TOPICS.name("heartbeats")])[TOPICS.name("heartbeats")].end == {0: 1}
    writer.close()


def test_a_call_is_repeated_until_the_log_answers():
    tries, said = [], []

    def call() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise LogUnavailable("away")
        return "here"

    assert until_answered(call, said.append) == "here"
    assert said == ["the log: away"] * 2


def test_a_log_that_never_answers_is_an_error_at_the_deadline():
    def call() -> None:
        raise LogUnavailable("away")

    with pytest.raises(LogUnavailable, match="away"):
        until_answered(call, print, timeout_s=0.1)


def test_a_role_is_waited_for_until_its_deadline_and_not_when_stopping(log):
    other = log.reopen()
    other.acquire("t.process.trainer", owner="first", ttl_ms=60_000, timeout_ms=0)
    process = Process(log, TOPICS, name="second", role="trainer")
    with pytest.raises(Timeout, match=r"waited 0.03 s for role .*held by first"):
        process.acquire("trainer", ttl_ms=10, timeout_ms=10)
    process.stop()
    assert process.acquire("trainer", ttl_ms=10) is None
    other.close()
