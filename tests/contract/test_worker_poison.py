"""Poison on the join's topics stops no partition; a store that is away stops one, and says so."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from join_run import JoinRun, ids
from join_scripts import rew, scored, sequence, traj
from object_store import ObjectStore
from waiting import until

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams.log import TopicSpec
from streamrft.streams.settings import StreamSettings

FAST = StreamSettings(grace_ms=0)
HOME = partition_for(b"g1", 4)
NEIGHBOUR = next(g for g in "abcdefgh" if partition_for(g.encode(), 4) != HOME)


@pytest.fixture
def run(log, place) -> JoinRun:
    return JoinRun(log, namespace=place.name("run"), engine=place.engine)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path / "store")
    yield store
    store.stop()


def group(group_id: str, size: int = 2) -> list[ev.Trajectory]:
    return [scored(f"{group_id}:{i}:a", float(i), size=size, at=now_ms()) for i in range(size)]


def places(letters: list[ev.DeadLetter]) -> list[tuple[str, int, int]]:
    return sorted((x.topic, x.partition, x.offset) for x in letters)


# --- records


@dataclass(frozen=True)
class Poison:
    """A bad record beside those of test_worker; `says` is part of the reason."""

    name: str
    topic: str
    value: bytes
    says: str


REWARD = {"event_id": "r", "trajectory_id": "g1:0:a", "source": "judge", "value": 1.0}
TEXT = json.dumps(REWARD).encode()
GOOD = codec.encode(scored("bad:0:a", 1.0, at=1_000))
POISON = [
    Poison("bad UTF-8 in Avro", "trajectories", GOOD.replace(b"bad:0:a", b"bad:0:\xff"), "corrupt"),
    Poison("bad UTF-8 in JSON", "rewards", TEXT.replace(b"judge", b"\xff\xfe"), "JSON reward"),
    Poison("JSON without a field", "rewards", b"{}", "event_id"),
    Poison("JSON of another type", "rewards", TEXT.replace(b"1.0", b'"1"'), "JSON reward"),
    Poison("JSON too deep", "rewards", b'{"a":' * 100_000, "JSON reward"),
    Poison("JSON without end", "rewards", TEXT.replace(b"1.0", b"1e999"), "out of range"),
    Poison("JSON that is NaN", "rewards", TEXT.replace(b"1.0", b"NaN"), "JSON reward"),
    Poison("JSON list", "rewards", b"[" + TEXT + b"]", "no Avro"),
    Poison("JSON behind JSON", "rewards", TEXT + TEXT, "JSON reward"),
    Poison("JSON trajectory", "trajectories", b'{"trajectory_id": "g1:0:a"}', "no Avro"),
    Poison("id with a space", "rewards", TEXT.replace(b"g1:0:a", b"g1:0:a b"), "no id"),
    Poison("marker alone", "rewards", b"\xc3\x01", "no Avro"),
    Poison("a drop", "rewards", codec.encode(ev.Ended(branch="b", num_groups=1, produced_at=1)),
           "Reward expected"),
]  # fmt: skip


def test_every_kind_of_poison_in_one_batch_is_set_aside_and_neighbours_go_on(run):
    first, last = group("g1")
    run.send(first)
    sent = [(run.send_raw(p.topic, p.value, key=b"g1", partition=HOME), p) for p in POISON]
    run.send(last, *group(NEIGHBOUR))
    run.drive(lambda: run.num("experiences") == 4 and run.num("dead_letters") >= len(POISON), FAST)
    found = {(x.topic, x.partition, x.offset): x for x in run.dead_letters()}
    assert len(found) == len(run.dead_letters()) == len(POISON)
    for at, poison in sent:
        assert poison.says in found[at].error, poison.name
        assert (found[at].value, found[at].reader) == (poison.value, "join-0")
    assert run.drops() == []


def test_random_bytes_stop_nothing(run):
    source = random.Random(7)
    first, last = group("g1")
    run.send(first)
    sent = []
    for i in range(60):
        begin = (b"", b"\xc3\x01", GOOD[:10], b"{", GOOD[:40])[i % 5]
        topic = source.choice(("trajectories", "rewards"))
        value = begin + source.randbytes(source.randrange(200))
        sent.append(run.send_raw(topic, value, key=source.randbytes(3), partition=HOME))
    run.send(last)
    run.drive(lambda: run.num("experiences") == 2 and run.num("dead_letters") == 60, FAST)
    assert places(run.dead_letters()) == sorted(sent)


def test_records_without_a_key_count_by_what_they_say(run):
    member, reward = traj("g1:0:a", at=now_ms()), rew("g1:0:a", 2.0, at=now_ms())
    lost = run.send(traj(f"{NEIGHBOUR}:0:a", at=now_ms()), key=None, partition=HOME)
    run.send(member, key=None, partition=HOME)
    run.send(reward, key=None, partition=(HOME + 2) % 4)
    run.drive(lambda: run.num("experiences") == 1 and run.num("dead_letters") == 1, FAST)
    assert [(e.trajectory_id, e.reward) for e in run.experiences()] == [("g1:0:a", 2.0)]
    (letter,) = run.dead_letters()
    assert ((letter.topic, letter.partition, letter.offset), letter.key) == (lost[0], None)
    assert "Send it with its group_id as the key" in letter.error


def test_giant_records_of_others_are_left_where_they_lie(run, place):
    """Over what this run's own processes may write: somebody widened the topic."""
    wide = place.open(max_event_bytes=24 * 2**20)
    for topic in ("trajectories", "rewards"):
        wide.ensure_topics([TopicSpec(run.topics.name(topic), 4, max_event_bytes=24 * 2**20)])
    producer = wide.producer()
    first, last = group("g1")
    run.send(first)
    giant = scored("g1:1:b", 1.0, size=2, at=now_ms(), metrics={"x" * 100: 1.0})
    values = {
        "trajectories": codec.encode(giant) + bytes(20 * 2**20),
        "rewards": b'{"event_id": "' + b"r" * (20 * 2**20),
    }
    for topic, value in values.items():
        producer.send(run.topics.name(topic), value, key=b"g1")
    sent = producer.flush()
    run.send(last)
    run.drive(lambda: run.num("experiences") == 2 and run.num("dead_letters") == 2, FAST)
    assert places(run.dead_letters()) == sorted(sent)
    assert all(x.value is None and "left at its position" in x.error for x in run.dead_letters())


# --- objects beside the log


def test_a_claim_whose_object_is_gone_is_poison(run, store):
    whole = [
        scored(f"g1:{i}:a", 1.0, size=4, at=now_ms(), sequences=[sequence(64)]) for i in (0, 1)
    ]
    gone, altered = map(store.put_claim, whole)
    store.path_of(gone).unlink()
    store.path_of(altered).write_bytes(b"other bytes")
    nowhere = traj("g1:2:a", size=4, at=now_ms())
    claim = ev.Claim(uri="gopher://host/object", sha256="0" * 64, size_bytes=1)
    nowhere = msgspec.structs.replace(nowhere, sequences=[], claim=claim)
    sent = run.send(gone, altered, nowhere)
    run.send(scored("g1:3:a", 1.0, size=4, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 1 and run.num("dead_letters") == 3, FAST)
    assert places(run.dead_letters()) == sorted(sent)
    reasons = " ".join(x.error for x in run.dead_letters())
    assert "StorageGone" in reasons and "StorageCorrupt" in reasons and "gopher" in reasons
    assert ids(run.drops()) == ["g1:0:a", "g1:1:a", "g1:2:a"]
    assert {d.reason for d in run.drops()} == {"invalid"}
    assert run.experiences()[0].group_experiences == 1


def test_a_claim_that_is_gone_when_its_group_closes_ends_as_invalid(run, store):
    """The tokens were there when the record was read, and are needed again after a restart."""
    claimed = store.put_claim(traj("g1:0:a", size=2, at=now_ms(), sequences=[sequence(64)]))
    run.send(claimed, traj("g1:1:a", size=2, at=now_ms()))
    run.drive(lambda: run.counters().get("trajectories") == 2, FAST)
    store.path_of(claimed).unlink()
    run.send(*[rew(f"g1:{i}:a", 1.0, at=now_ms()) for i in range(2)])
    run.drive(lambda: len(run.ends()) == 2, FAST)
    assert ids(run.experiences()) == ["g1:1:a"]
    assert [(d.trajectory_id, d.reason) for d in run.drops()] == [("g1:0:a", "invalid")]


def test_a_store_that_is_away_holds_its_partition_by_name_until_it_is_back(run, store):
    claimed = store.put_claim(scored("g1:0:a", 1.0, at=now_ms(), sequences=[sequence(64)]))
    store.stop()
    run.send(claimed, *group(NEIGHBOUR))
    back = threading.Timer(0, store.start)

    def is_done() -> bool:
        named = any(store.uri in blocker for blocker in run.process.blockers)
        if named and run.num("experiences") == 2 and not back.ident:
            assert {e.group_id for e in run.experiences()} == {NEIGHBOUR}
            back.start()
        return run.num("experiences") == 3

    run.drive(is_done, FAST)
    (blocker,) = {b for b in run.process.blockers if store.uri in b}
    assert (
        blocker.startswith(f"partition {HOME}: {store.uri}/claims/") and "cannot be read" in blocker
    )
    (e,) = [e for e in run.experiences() if e.group_id == "g1"]
    assert (e.num_tokens, e.trajectory) == (64, codec.encode(claimed))
    assert run.dead_letters() == run.drops() == []


def test_what_holds_a_partition_stands_in_the_heartbeat_of_a_worker_process(run, place, store):
    claimed = store.put_claim(scored("g1:0:a", 1.0, at=now_ms(), sequences=[sequence(64)]))
    store.stop()
    run.send(claimed)
    with run.spawn(place.url):
        wait_for_beat(run, store.uri)
        assert run.num("dead_letters") == run.num("experiences") == 0
        store.start()
        until(lambda: run.num("experiences") == 1, "that it goes on by itself")
    assert run.dead_letters() == []


def wait_for_beat(run: JoinRun, text: str) -> None:
    until(
        lambda: any(
            text in beat.waiting_for and beat.state == "idle"
            for beat in run.events("heartbeats", ev.Heartbeat)
        ),
        f"a heartbeat that waits for {text}",
    )
