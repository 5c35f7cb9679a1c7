"""Where an event goes: its topic, its key and its partition."""

from __future__ import annotations

import pytest

from streamrft.schemas import events
from streamrft.schemas.errors import ConfigError
from streamrft.schemas.topics import CATALOGUE, Topics, key_of, partition_for

REWARD = events.Reward(event_id="r", trajectory_id="g.1:0:a", source="s", value=1.0)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_partition_is_the_java_clients(key, expected):
    """Expected hashes: Kafka's own UtilsTest.testMurmur2."""
    for num_partitions in (1, 4, 64):
        assert partition_for(key, num_partitions) == (expected & 0x7FFFFFFF) % num_partitions


def test_every_event_type_has_exactly_one_topic():
    carried = [cls for topic in CATALOGUE.values() for cls in topic.carries]
    assert sorted(c.__name__ for c in carried) == sorted(c.__name__ for c in events.EVENTS)


def test_topics_that_one_worker_joins_have_the_same_partitions_and_key():
    topics = Topics("p.n", num_partitions=7)
    joined = ("trajectories", "rewards", "experiences", "drops", "clock", "join_state")
    assert {topics.partitions(t) for t in joined} == {7}
    assert {CATALOGUE[t].key for t in joined} - {"partition"} == {"group_id"}
    assert topics.partitions("tasks") == 64
    assert topics.partitions("train_steps") == topics.partitions("checkpoints") == 1


def test_reward_lies_beside_its_trajectory():
    assert key_of(REWARD, "rewards") == b"g.1"


@pytest.mark.parametrize(
    ("event", "topic", "key"),
    [
        (events.Ended(branch="main", num_groups=9, produced_at=1), "tasks", b"ended"),
        (events.Branch(branch="b", parent="main", step=90, produced_at=1), "checkpoints", b"b/90"),
        (
            events.Clock(partition=3, time_ms=1, positions={}, produced_at=1),
            "clock",
            b"3",
        ),
    ],
)
def test_key_is_the_one_of_the_catalogue(event, topic, key):
    assert key_of(event, topic) == key


def test_names_carry_the_run():
    topics = Topics("gsm8k.first")
    assert topics.name("tasks") == "gsm8k.first.tasks"
    assert topics.short("gsm8k.first.tasks") == "tasks"


def test_namespace_must_be_an_id():
    with pytest.raises(ConfigError, match="'my project.x'"):
        Topics("my project.x")


@pytest.mark.parametrize(
    ("trajectory_id", "group_id"),
    [("g.1:0:a", "g.1"), ("session:42:0:a", "session:42"), ("g.1", "g.1")],
)
def test_group_of_a_trajectory_id(trajectory_id, group_id):
    assert events.group_of(trajectory_id) == group_id


@pytest.mark.parametrize("text", ["", "a b", "a/b", "ü", "a\n"])
def test_what_is_no_id(text):
    assert not events.is_id(text)
