"""Memory of the join's open state: groups of eight that wait for one more reward source.

Measured by the growth of the resident size of a fresh process; beside it the same groups as plain
Python dictionaries, which is what the state would be without care.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import psutil
from workers.rollouts import GROUP, sequence_of, trajectory

from streamrft.schemas import events as ev
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.log import Position
from streamrft.streams.settings import StreamSettings

Build = Callable[[int, list[bytes]], Any]
SEQUENCE = sequence_of(200)
DEADLINE_MS = 3 * 24 * 3_600_000


def rollout(group: int, slot: int) -> ev.Trajectory:
    """It waits for a reward from a person."""
    return trajectory(
        group,
        slot,
        SEQUENCE,
        attempt=f"{group * GROUP + slot:016x}",
        scores=[ev.Score(source="accuracy", value=1.0), ev.Score(source="format", value=0.1)],
        reward_sources={"accuracy": 1.0, "format": 1.0, "human": 1.0},
        reward_deadline_ms=DEADLINE_MS,
    )


def join_state(groups: range) -> RewardJoin:
    """Open groups with half of their outside rewards."""
    join = RewardJoin(StreamSettings())
    for group in groups:
        for slot in range(GROUP):
            t = rollout(group, slot)
            offset = group * GROUP + slot
            join.on_trajectory(t, Position("trajectories", 0, offset))
            if slot % 2:
                join.on_reward(
                    ev.Reward(
                        event_id=f"human-{offset:016x}",
                        trajectory_id=t.trajectory_id,
                        source="human",
                        value=0.5,
                        produced_at=t.produced_at + 5,
                    )
                )
    assert join.gauges()["open_groups"] == len(groups)
    return join


def snapshots(num_groups: int) -> list[bytes]:
    """The durable state of that many groups."""
    states: list[bytes] = []
    for first in range(0, num_groups, 1_000):
        changes = join_state(range(first, min(first + 1_000, num_groups))).take_changes()
        states += [value for value in changes.values() if value is not None]
    return states


def filled(num_groups: int, _: list[bytes]) -> Any:
    return join_state(range(num_groups))


def restored(num_groups: int, states: list[bytes]) -> Any:
    """The same state as a restarted worker holds it."""
    join = RewardJoin(StreamSettings())
    join.restore(states, counts={}, time_ms=0)
    assert join.gauges()["open_groups"] == num_groups
    return join


def plain_dictionaries(num_groups: int, _: list[bytes]) -> Any:
    """What is compared: the header fields and rewards of each member in a dictionary."""
    groups: dict[str, Any] = {}
    for group in range(num_groups):
        members = {}
        for slot in range(GROUP):
            t = rollout(group, slot)
            rewards = {
                source: {"value": 0.5, "revision": 0, "event_id": f"{source}-{group}-{slot}"}
                for source in list(t.reward_sources)[: 2 + slot % 2]
            }
            members[slot] = {
                "trajectory_id": t.trajectory_id,
                "position": {"topic": "trajectories", "partition": 0, "offset": group},
                "reward_sources": dict(t.reward_sources),
                "produced_at": t.produced_at,
                "deadline_ms": t.produced_at + DEADLINE_MS,
                "rewards": rewards,
            }
        groups[f"bench.{group}"] = {"size": GROUP, "number": group, "members": members}
    return groups


def grown_bytes(build: Build, num_groups: int, out: Any) -> None:
    """Growth of this process while `build` fills its state, the seconds, the durable bytes."""
    states = snapshots(num_groups)
    build(8, states[:8])
    gc.collect()
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    state = build(num_groups, states)
    took_s = time.perf_counter() - began
    gc.collect()
    out.put((psutil.Process().memory_info().rss - before, took_s, sum(map(len, states))))
    del state


def measure(build: Build, num_groups: int) -> tuple[int, float, int]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    child = context.Process(target=grown_bytes, args=(build, num_groups, out))
    child.start()
    found = out.get(timeout=600)
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="10,000 groups instead of 100,000")
    asked = parser.parse_args()
    num_groups = 10_000 if asked.quick else 100_000
    builds = {
        "join": filled,
        "join, restored": restored,
        "plain dictionaries": plain_dictionaries,
    }
    found = {name: measure(build, num_groups) for name, build in builds.items()}
    result: dict[str, float] = {"num_groups": num_groups, "group_size": GROUP}
    for name, (size, took_s, _) in found.items():
        key = name.replace(", ", "_").replace(" ", "_")
        result[f"{key}_bytes"] = size
        result[f"{key}_bytes_per_group"] = size / num_groups
        result[f"{key}_s"] = took_s
    result["durable_bytes"] = found["join"][2]
    result["plain_over_join"] = found["plain dictionaries"][0] / max(1, found["join"][0])
    if asked.json:
        print(json.dumps(result))
        return
    print(f"{num_groups:,} open groups of {GROUP}, three sources each, one outstanding\n")
    print(f"{'state':<20} {'MB':>8} {'bytes/group':>12} {'filled in s':>12}")
    for name, (size, took_s, _) in found.items():
        print(f"{name:<20} {size / 1e6:>8.0f} {size / num_groups:>12,.0f} {took_s:>12.1f}")
    durable = result["durable_bytes"]
    print(f"{'durable (msgpack)':<20} {durable / 1e6:>8.0f} {durable / num_groups:>12,.0f}")


if __name__ == "__main__":
    main()
