"""What the join workers read: trajectories of about 4 KB and their rewards, some of them twice."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from confluent_kafka import Consumer, Producer

from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics, key_of, partition_for

GROUP, NUM_TOKENS, REPEATED, NUM_PARTITIONS = 8, 420, 0.05, 4
SOURCES = ("judge", "human")

Feed = list[tuple[str, bytes, bytes]]


def build_feed(num_trajectories: int) -> Feed:
    """(topic, key, value) in order: a group's rewards some hundred records behind it, repeats."""
    randomness = random.Random(0)
    placed: list[tuple[float, str, ev.Event]] = []
    sequence = sequence_of(NUM_TOKENS)
    for i in range(num_trajectories):
        t = trajectory(i // GROUP, i % GROUP, sequence)
        placed.append((i, "trajectories", t))
        for source in SOURCES:
            placed.append((i + randomness.uniform(1, 400), "rewards", reward(t, source)))
    placed += [
        (at + randomness.uniform(0, 400), topic, event)
        for at, topic, event in placed
        if randomness.random() < REPEATED
    ]
    placed.sort(key=lambda found: found[0])
    return [(topic, key_of(event, topic), encoded(event)) for _, topic, event in placed]


def encoded(event: ev.Event) -> bytes:
    """Rewards of people come as JSON, all else as Avro."""
    if isinstance(event, ev.Reward) and event.source == "human":
        return msgspec.json.encode(event)
    return codec.encode(event)


def trajectory(number: int, slot: int, sequence: ev.Sequence) -> ev.Trajectory:
    """One rollout as an explorer publishes it; both its rewards come from outside."""
    group_id = f"bench.{number}"
    return ev.Trajectory(
        trajectory_id=f"{group_id}:{slot}:a1",
        group_id=group_id,
        slot=slot,
        attempt="a1",
        number=number,
        taskset="bench",
        row=number,
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=GROUP,
        sequences=[sequence],
        finish_reason="stop",
        reward_sources=dict.fromkeys(SOURCES, 1.0),
        metrics={"response_length": float(sequence.num_tokens)},
        produced_at=ev.now_ms(),
    )


def reward(t: ev.Trajectory, source: str) -> ev.Reward:
    """A score from outside."""
    return ev.Reward(
        event_id=f"{source}-{t.number}-{t.slot}",
        trajectory_id=t.trajectory_id,
        source=source,
        value=float(t.slot % 2),
        produced_at=t.produced_at + 5,
    )


def sequence_of(num_tokens: int) -> ev.Sequence:
    """A sequence of which the policy wrote three quarters."""
    rng = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return ev.Sequence(
        tokens=arrays.pack_ints(rng.integers(0, 50_000, num_tokens)),
        loss_mask=arrays.pack_mask(mask),
        logprobs=arrays.pack_floats(np.where(mask, -rng.random(num_tokens), 0.0)),
        policy_versions=arrays.pack_runs([3] * int(mask.sum())),
    )


def write(servers: str, topics: Topics, feed: Feed) -> None:
    """Put the feed on the topics of one run, as its producers would place it."""
    producer = raw_producer(servers)
    for topic, key, value in feed:
        place = partition_for(key, NUM_PARTITIONS)
        while True:
            try:
                producer.produce(topics.name(topic), value, key, place)
                break
            except BufferError:
                producer.poll(0.05)
    assert not producer.flush(60), "the feed was not acknowledged"


def raw_producer(servers: str, compression: str = "zstd") -> Producer:
    """With the promises of our own: idempotent, acknowledged by all, zstd unless told."""
    return Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "compression.type": compression,
            "linger.ms": 5,
        }
    )


def raw_consumer(servers: str, group: str) -> Consumer:
    """Co-located partitions, committed by hand."""
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "range",
            "fetch.wait.max.ms": 100,
        }
    )
