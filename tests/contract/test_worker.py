"""The join worker over every log, on Kafka with both of its shells."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from join_run import JoinRun, ids
from join_scripts import failed, rew, scored, traj
from waiting import until

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import OffsetOutOfRange, StreamrftError
from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams.log import Partition
from streamrft.streams.reading import begins
from streamrft.streams.settings import OperatorSettings, StreamSettings

FAST = StreamSettings(grace_ms=0)


@pytest.fixture
def run(log, place) -> JoinRun:
    return JoinRun(log, namespace=place.name("run"), engine=place.engine)


def group(group_id: str, size: int = 2, **fields) -> list[ev.Trajectory]:
    """A whole group, scored when its rollouts ended: 0, 1, 2..."""
    return [
        scored(f"{group_id}:{slot}:a", float(slot), size=size, at=now_ms(), **fields)
        for slot in range(size)
    ]


def test_a_group_scored_in_its_records_becomes_experiences(run):
    members = group("g1", 3)
    at = {p.offset: t for p, t in zip(run.send(*members), members, strict=True)}
    run.drive(lambda: run.num("experiences") == 3)
    for e in run.experiences():
        t = at[e.trajectory_offset]
        assert (e.trajectory_id, e.slot, e.number) == (t.trajectory_id, t.slot, 7)
        assert e.trajectory == codec.encode(t)
        assert e.trajectory_partition == partition_for(b"g1", 4)
        assert (e.num_tokens, e.num_trained_tokens) == (4, 3)
        assert (e.reward, e.reward_parts) == (float(t.slot), {"judge": float(t.slot)})
        assert [(m.slot, m.reward) for m in e.group] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        assert e.group_experiences == 3
    assert all(r.partition == partition_for(b"g1", 4) for r in run.records("experiences"))
    assert run.drops() == run.dead_letters() == []


def test_trace_context_goes_from_the_trajectory_to_the_experience(run):
    run.send(scored("g1:0:a", 1.0), headers=[("traceparent", b"00-abc"), ("other", b"x")])
    run.drive(lambda: run.num("experiences") == 1)
    assert run.records("experiences")[0].headers == (("traceparent", b"00-abc"),)


def test_rewards_come_as_json_and_before_their_trajectory(run):
    reward = {"event_id": "r1", "trajectory_id": "g1:0:a", "source": "judge", "value": 0.5}
    run.send_raw("rewards", json.dumps(reward).encode(), key=b"g1")
    run.drive(lambda: run.counters().get("early") == 1)
    run.send(traj("g1:0:a", at=now_ms(), reward_deadline_ms=60_000))
    run.drive(lambda: run.num("experiences") == 1)
    assert run.experiences()[0].reward == 0.5
    assert run.counters()["applied"] == 1


def test_a_restarted_worker_goes_on_with_open_groups(run):
    run.send(*[traj(f"g1:{slot}:a", size=2, at=now_ms()) for slot in range(2)])
    run.send(rew("g1:0:a", 1.0, at=now_ms()))
    run.drive(lambda: run.counters().get("applied") == 1)
    assert run.counters() | {"time_ms": 0} == run.counters() | {
        "open_groups": 1,
        "pending": 2,
        "trajectories": 2,
        "rewards": 1,
    }
    run.send(rew("g1:1:a", 2.0, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 2)
    assert sorted(e.reward for e in run.experiences()) == [1.0, 2.0]
    assert run.counters()["open_groups"] == run.counters()["pending"] == 0


def test_what_the_state_holds_is_not_counted_again_when_the_group_forgot_its_positions(run):
    run.send(*group("g1"), rew("g1:0:a", 1.0, at=now_ms()))
    run.drive(lambda: run.counters().get("rewards") == 1 and run.num("experiences") == 2)
    before = run.counters()
    forget_positions(run)
    run.drive(lambda: "trajectories and rewards" in run.process.blockers)
    assert run.counters() == before


def forget_positions(run: JoinRun) -> None:
    """As `offsets.retention.minutes` does, or a shell that stored them late."""
    starts = begins(run.log, *(run.topics.name(t) for t in ("trajectories", "rewards")))
    outsider = run.log.consumer(group=f"{run.topics.namespace}.join")
    deadline = time.monotonic() + 60
    while outsider.committed(starts) != starts:
        assert time.monotonic() < deadline, "a member that left keeps the group for over 60 s"
        with suppress(StreamrftError):
            outsider.commit(starts)
    outsider.close()


def test_payloads_out_of_the_cache_are_read_again(run):
    members = [traj(f"g1:{slot}:a", size=3, at=now_ms()) for slot in range(3)]
    run.send(*members)
    small = replace(FAST, cache_bytes=1)
    run.drive(lambda: run.counters().get("trajectories") == 3, small)
    run.send(*[rew(t.trajectory_id, 1.0, at=now_ms()) for t in members])
    run.drive(lambda: run.num("experiences") == 3, small)
    found = {e.trajectory_id: e.trajectory for e in run.experiences()}
    assert found == {t.trajectory_id: codec.encode(t) for t in members}


def test_a_reward_on_another_partition_is_sent_on(run):
    home = partition_for(b"g1", 4)
    run.send(traj("g1:0:a", at=now_ms()))
    run.send(rew("g1:0:a", 1.0, at=now_ms()), key=None, partition=(home + 1) % 4)
    run.drive(lambda: run.num("experiences") == 1)
    assert run.counters()["forwarded"] == 1
    assert [r.key for r in run.records("rewards") if r.partition == home] == [b"g1"]


def test_deadlines_fire_on_idle_topics_at_recorded_clock_events(run):
    late = traj("g1:0:a", size=2, at=now_ms(), reward_deadline_ms=500)
    run.send(late, scored("g1:1:a", 1.0, size=2, at=now_ms(), reward_deadline_ms=500))
    run.drive(lambda: run.num("experiences") == 1, FAST)
    (drop,) = run.drops()
    assert (drop.trajectory_id, drop.reason, drop.group_experiences) == ("g1:0:a", "expired", 1)
    assert "judge" in drop.detail
    clock = run.events("clock", ev.Clock)[-1]
    assert clock.time_ms >= late.produced_at + 500
    assert clock.positions["trajectories"] == 2
    assert {c.partition for c in run.events("clock", ev.Clock)} == {partition_for(b"g1", 4)}


def test_without_an_open_deadline_no_clock_event_is_written(run):
    run.send(traj("g1:0:a", size=2, at=now_ms()), *group("g2"))
    until = time.monotonic() + 1.5
    run.drive(lambda: time.monotonic() > until, FAST)
    assert run.num("clock") == 0


def test_what_is_forgotten_leaves_a_tombstone(run):
    run.send(*group("g1"))
    forgetful = replace(FAST, late_horizon_ms=300)
    run.drive(lambda: run.states().get(b"g1", b"") is None, forgetful)
    assert run.counters()["remembered"] == 0
    run.send(scored("g1:0:b", 1.0, size=2, at=now_ms() - 5_000))
    run.drive(lambda: run.num("drops") == 1, forgetful)
    assert run.drops()[0].reason == "late"


def test_a_group_whose_members_all_failed_ends_with_a_drop_that_says_so(run):
    run.send(*[failed(f"g1:{slot}:a", size=2, at=now_ms()) for slot in range(2)])
    run.drive(lambda: run.num("drops") == 2)
    assert [d.reason for d in run.drops()] == ["failed", "failed"]
    assert [d.group_experiences for d in run.drops()] == [None, 0]
    assert run.drops()[0].detail == "the environment broke"


def test_filters_name_themselves_and_their_numbers(run):
    members = [scored(f"g1:{slot}:a", 1.0, size=2, at=now_ms()) for slot in range(2)]
    run.send(*members, *group("g2"))
    settings = replace(FAST, filters=(OperatorSettings("reward_std_filter"),))
    run.drive(lambda: len(run.ends()) == 4, settings)
    assert ids(run.experiences()) == ["g2:0:a", "g2:1:a"]
    for drop in run.drops():
        assert (drop.reason, drop.where, drop.group_experiences) == (
            "filtered",
            "reward_std_filter",
            0,
        )
        assert drop.detail == "reward std 0 of 2 is not above threshold 0"


class Broken:
    """A user's filter that fails on one group."""

    def apply(self, group):
        if group.group_id == "g1":
            raise KeyError("no such metric")
        return []


def test_what_a_users_filter_raises_is_a_dead_letter_and_neighbours_go_on(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "users_filters", SimpleNamespace(Broken=Broken))
    run.send(*group("g1"), *group("g2"))
    settings = replace(FAST, filters=(OperatorSettings("users_filters.Broken"),))
    run.drive(lambda: len(run.ends()) == 4, settings)
    assert ids(run.experiences()) == ["g2:0:a", "g2:1:a"]
    assert {(d.reason, d.where, d.group_experiences) for d in run.drops()} == {
        ("invalid", "users_filters.Broken", 0)
    }
    assert len(run.dead_letters()) == 2
    assert all("no such metric" in letter.error for letter in run.dead_letters())


@dataclass(frozen=True)
class Poison:
    """A record that must not be read; `drop_of` the id that can still be read in it."""

    name: str
    topic: str
    value: bytes | None
    drop_of: str | None = None
    says: str = ""


GOOD = codec.encode(scored("bad:0:a", 1.0, at=1_000))
NAN = bytes.fromhex("0000c07f")
POISON = [
    Poison("nothing", "trajectories", None, says="no value"),
    Poison("empty", "trajectories", b"", says="no Avro"),
    Poison("garbage", "trajectories", b"\xc3\x02garbage", says="no Avro"),
    Poison("unknown schema", "trajectories", b"\xc3\x01" + bytes(8) + b"x", says="fingerprint"),
    Poison("cut in the middle", "trajectories", GOOD[:60], "bad:0:a", says="truncated"),
    Poison("cut behind the id", "trajectories", GOOD[:20], "bad:0:a", says="truncated"),
    Poison("cut in the id", "trajectories", GOOD[:14], says="truncated"),
    Poison("bytes behind the end", "trajectories", GOOD + b"x", "bad:0:a", says="after its end"),
    Poison("a reward", "trajectories", codec.encode(rew("bad:0:a")), says="Trajectory expected"),
    Poison(
        "a log-prob that is not finite",
        "trajectories",
        GOOD.replace(bytes.fromhex("000000bf"), NAN),
        "bad:0:a",
        says="not finite",
    ),
    Poison(
        "from the future",
        "trajectories",
        codec.encode(scored("bad:0:a", 1.0, at=2**42)),
        "bad:0:a",
        says="max_skew_ms",
    ),
    Poison("a trajectory", "rewards", GOOD, says="Reward expected"),
    Poison("json that is none", "rewards", b'{"value": ', says="JSON"),
    Poison("json with another field", "rewards", b'{"valu": 1}', says="JSON"),
    Poison(
        "a slot that is no number",
        "rewards",
        b'{"event_id":"r","trajectory_id":"g1:x:a","source":"judge","value":1}',
        says="slot number",
    ),
    Poison(
        "a reward from the future",
        "rewards",
        codec.encode(rew("g1:0:a", at=2**42)),
        says="max_skew_ms",
    ),
    Poison("a large one", "trajectories", b"z" * 8_000_000, says="left at its position"),
]


def test_a_bad_record_is_dead_lettered_with_its_position_and_neighbours_go_on(run):
    first, last = group("g1")
    run.send(first)
    sent: dict[tuple[str, int, int], Poison] = {}
    for i, poison in enumerate(POISON):
        name = b"b%02d" % i  # each of a group of its own
        mine = replace(
            poison,
            value=poison.value and poison.value.replace(b"bad", name),
            drop_of=poison.drop_of and poison.drop_of.replace("bad", name.decode()),
        )
        at = run.send_raw(mine.topic, mine.value, key=b"g1", partition=partition_for(b"g1", 4))
        sent[at] = mine
    run.send(last)
    small, num = replace(FAST, max_event_bytes=8_000_000), len(POISON)
    run.drive(lambda: run.num("experiences") == 2 and run.num("dead_letters") >= num, small)
    letters = {(found.topic, found.partition, found.offset): found for found in run.dead_letters()}
    assert letters.keys() == sent.keys() and len(run.dead_letters()) == num
    for at, poison in sent.items():
        assert (letters[at].key, letters[at].reader) == (b"g1", "join-0"), poison.name
        assert poison.says in letters[at].error, poison.name
        kept = None if poison.name == "a large one" else poison.value
        assert letters[at].value == kept, poison.name
    assert ids(d for d in run.drops() if d.reason == "invalid") == [
        poison.drop_of for poison in sent.values() if poison.drop_of
    ]
    assert run.counters()["dead_letters"] == num


def test_a_refused_record_is_dropped_once_however_often_it_comes(run):
    future = scored("g1:0:a", 1.0, at=2**42)
    run.send(future, future, future)
    run.drive(lambda: run.num("dead_letters") == 3 and run.num("drops") > 0, FAST)
    assert ids(run.drops()) == ["g1:0:a"]
    assert run.drops()[0].group_experiences == 0
    assert run.counters()["repeats"] == 2


def test_a_refused_record_holds_its_group_open_no_longer_than_the_grace(run):
    run.send(scored("g1:0:a", 1.0, size=2, at=2**42), scored("g1:1:a", 1.0, size=2, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 1, FAST)
    assert [(d.trajectory_id, d.reason) for d in run.drops()] == [("g1:0:a", "invalid")]
    assert run.experiences()[0].group_experiences == 1


def test_what_retention_deleted_unjoined_ends_the_worker_until_it_may_be_skipped(run, log, place):
    name, hour_ms = run.topics.name("trajectories"), 3_600_000
    home = partition_for(b"g0", 4)
    alike = [g for g in map("g{}".format, range(40)) if partition_for(g.encode(), 4) == home]
    joined, lost, kept = alike[:3]
    old_ms = now_ms() - 2 * hour_ms
    run.send(scored(f"{joined}:0:a", 1.0, at=old_ms), timestamp_ms=old_ms)
    run.drive(lambda: run.num("experiences") == 1)
    run.send(scored(f"{lost}:0:a", 1.0, at=old_ms), timestamp_ms=old_ms)
    young = scored(f"{kept}:0:a", 1.0, at=now_ms())
    run.send(young)
    if place.url.startswith("kafka"):  # by hand: retention deletes whole segments only
        from confluent_kafka import TopicPartition

        (deleted,) = log._cluster.admin.delete_records([TopicPartition(name, home, 2)]).values()
        deleted.result(60)
    else:
        log.alter_topic(name, settings={"retention.ms": str(hour_ms)})
    until(lambda: bool(run.send(young)) and begins(log, name)[Partition(name, home)] == 2)
    with pytest.raises(OffsetOutOfRange, match="offsets 1 to 1 before they.*skip_lost: true"):
        run.drive(lambda: False)
    run.drive(lambda: run.num("experiences") == 2, replace(FAST, skip_lost=True))
    assert {e.group_id for e in run.experiences()} == {joined, kept}
