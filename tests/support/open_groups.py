"""The state topic of a join with many open groups, as its worker's batches would have left it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from join_scripts import rew, traj

from streamrft.schemas.topics import Topics, partition_for
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.log import Log, Position
from streamrft.streams.outbox import COUNTERS_KEY, encode_counters
from streamrft.streams.settings import StreamSettings

GROUP, NUM_WRITES = 8, 4
_GROUP_ID, _ATTEMPT = "open.NNNNNNNN", "SSSSSSSSSSSSSSS%d"
_CHUNK = 2_000


def group_id(n: int) -> str:
    """The id of the n-th group."""
    return _GROUP_ID.replace("NNNNNNNN", f"{n:08d}")


def member_id(n: int, slot: int) -> str:
    """The trajectory id that holds a slot of the n-th group."""
    return f"{group_id(n)}:{slot}:{_attempt(n, slot)}"


def _attempt(n: int, slot: int) -> str:
    return f"{(n * GROUP + slot + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"


def write_open_groups(log: Log, topics: Topics, num: int) -> int:
    """Write the state of groups of 8 with four of them rewarded, each group four times.

    Returns:
        Bytes of all values.
    """
    name, producer, size_bytes = topics.name("join_state"), log.producer(), 0
    templates = list(_templates())
    num_here: dict[int, int] = defaultdict(int)
    for first in range(0, num, _CHUNK):
        groups = range(first, min(first + _CHUNK, num))
        homes = {n: partition_for(group_id(n).encode(), topics.num_partitions) for n in groups}
        for stage, template in enumerate(templates):
            with producer.transaction():
                for n, home in homes.items():
                    value = _filled(template, n)
                    size_bytes += len(value)
                    producer.send(name, value, key=group_id(n).encode(), partition=home)
                    num_here[home] += stage == 0
                for home in set(homes.values()):
                    counters = encode_counters({"open_groups": num_here[home]}, {})
                    producer.send(name, counters, key=COUNTERS_KEY, partition=home)
    producer.close()
    return size_bytes


def _templates() -> Iterator[bytes]:
    """One group's state: half of its trajectories, all, two rewards, four."""
    join = RewardJoin(StreamSettings())
    names = [f"{_GROUP_ID}:{slot}:{_ATTEMPT % slot}" for slot in range(GROUP)]
    members = [traj(name, size=GROUP, at=1_700_000_000_000) for name in names]
    stages = (members[:4], members[4:], *([rew(n, at=1) for n in names[i : i + 2]] for i in (0, 2)))
    for stage in stages:
        for event in stage:
            if event in members:
                join.on_trajectory(event, Position("trajectories", 0, 1_000_000 + event.slot))
            else:
                join.on_reward(event)
        (state,) = join.take_changes().values()
        assert state is not None
        yield state


def _filled(template: bytes, n: int) -> bytes:
    value = template.replace(b"NNNNNNNN", b"%08d" % n)
    for slot in range(GROUP):
        value = value.replace((_ATTEMPT % slot).encode(), _attempt(n, slot).encode())
    return value
