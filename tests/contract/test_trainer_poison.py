"""Poison on the trainer's topics stops no training; each is a dead letter with its position."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from object_store import ObjectStore
from training_feed import TOPICS, Feed, ended, experience, group, trained_ids

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import LogUnavailable


@pytest.fixture
def feed(tmp_path: Path, tiny_model_dir: Path):
    made = Feed(tmp_path, tiny_model_dir)
    yield made
    made.close()


def send(
    feed: Feed,
    topic: str,
    value: bytes | None,
    key: bytes | None = b"other.1",
    partition: int | None = 0,
):
    producer = feed.log.producer()
    producer.send(TOPICS.name(topic), value, key=key, partition=partition)
    return producer.flush()[0]


def places(letters: list[ev.DeadLetter]) -> list[tuple[str, int, int]]:
    return sorted((x.topic, x.partition, x.offset) for x in letters)


GOOD = codec.encode(experience(7, 0))
EXPERIENCES = {
    "nothing": None,
    "empty": b"",
    "garbage": b"\xc3\x02garbage",
    "unknown schema": b"\xc3\x01" + bytes(8) + b"x",
    "cut in the id": GOOD[:14],
    "a reward": codec.encode(ev.Ended(branch="b", num_groups=1, produced_at=1)),
    "JSON": b'{"trajectory_id": "rows.7:0:a"}',
    "bad UTF-8": GOOD.replace(b"rows.7:0:a", b"rows.7:0:\xff", 1),
    "giant": b"z" * (8 * 2**20 - 1_000),
    "random": random.Random(3).randbytes(300),
}


def test_poison_among_experiences_stops_no_training(feed: Feed):
    feed.write(*group(0))
    sent = [send(feed, "experiences", value) for value in EXPERIENCES.values()]
    sent += [send(feed, "experiences", b"without a key", key=None)]
    sent += [send(feed, "drops", b"no drop"), send(feed, "tasks", b"no task")]
    feed.write(*group(1))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    assert trained_ids(feed.cuts) == [f"rows.{n}:{s}:a" for n in (0, 1) for s in (0, 1)]
    letters = feed.read("dead_letters", ev.DeadLetter)
    assert places(letters) == sorted(sent)
    assert all(x.error and x.reader == "trainer" for x in letters)


def test_members_whose_trajectory_or_claim_is_broken_are_dropped_and_the_others_train(feed: Feed):
    store = ObjectStore(feed.folder / "storage")
    whole = codec.decode(experience(0, 0).trajectory, ev.Trajectory)
    claimed = store.put_claim(whole)
    store.path_of(claimed).unlink()
    feed.write(experience(0, 0, trajectory=codec.encode(claimed)), experience(0, 1))
    feed.write(experience(1, 0, trajectory=b"no trajectory"), experience(1, 1))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    store.stop()
    assert trained_ids(feed.cuts) == ["rows.0:1:a", "rows.1:1:a"]
    dropped = {d.trajectory_id: d for d in feed.read("drops", ev.Drop)}
    assert {d.reason for d in dropped.values()} == {"invalid"}
    assert "there is no such object" in dropped["rows.0:0:a"].detail
    assert "its trajectory" in dropped["rows.1:0:a"].detail
    assert len(feed.read("dead_letters", ev.DeadLetter)) == 2


def test_a_broken_repeat_takes_nothing_from_the_experience_that_waits(feed: Feed):
    feed.write(experience(0, 0))
    cut = codec.encode(experience(0, 0))[:-3]
    send(feed, "experiences", cut, key=b"rows.0", partition=None)
    feed.write(experience(0, 1))
    source = feed.open_source()
    for _ in range(2):  # the second reads what the first would have dropped
        source.poll(0, timeout_ms=0)
    batch = source.next_batch(0)
    assert batch is not None
    assert [m.trajectory_id for m in batch.members] == ["rows.0:0:a", "rows.0:1:a"]
    assert feed.read("drops", ev.Drop) == []
    assert len(feed.read("dead_letters", ev.DeadLetter)) == 1
    source.close()


def test_log_away_at_a_poison_record_loses_none_of_those_behind_it(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
):
    feed.write(experience(0, 0, trajectory=b"no trajectory"), experience(0, 1), *group(1))
    feed.write(ended(2), topic="tasks")
    source = feed.open_source()
    records = sorted(source._consumer.poll(100), key=lambda r: r.topic.endswith("tasks"))
    with monkeypatch.context() as away:
        away.setattr(source._consumer, "poll", lambda *_: records)
        away.setattr(source._announcer, "publish", unanswered)
        with pytest.raises(LogUnavailable):
            source.poll(0, timeout_ms=0)
    assert source.position()["tasks"] == 0, "its end was not taken in yet"
    trained: list[str] = []
    while (batch := source.next_batch(0)) is not None:
        trained += [m.trajectory_id for m in batch.members]
        source.take(batch)
    assert sorted(trained) == ["rows.0:1:a", "rows.1:0:a", "rows.1:1:a"] and source.is_finished
    assert [d.trajectory_id for d in feed.read("drops", ev.Drop)] == ["rows.0:0:a"]
    assert len(feed.read("dead_letters", ev.DeadLetter)) == 1
    assert source.position()["tasks"] == 1
    source.close()


def unanswered(*_: object) -> None:
    raise LogUnavailable("no broker answers")
