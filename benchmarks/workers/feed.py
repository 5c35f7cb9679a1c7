"""What the join workers read: trajectories of about 4 KB and their rewards, some of them twice."""

from __future__ import annotations

import random

import msgspec
from confluent_kafka import Consumer, Producer
from workers.rollouts import GROUP, sequence_of, trajectory

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics, key_of, partition_for

NUM_TOKENS, REPEATED, NUM_PARTITIONS = 420, 0.05, 4
SOURCES = ("judge", "human")

Feed = list[tuple[str, bytes, bytes]]


def build_feed(num_trajectories: int) -> Feed:
    """(topic, key, value) in order: a group's rewards some hundred records behind it, repeats."""
    randomness = random.Random(0)
    placed: list[tuple[float, str, ev.Event]] = []
    sequence = sequence_of(NUM_TOKENS)
    for i in range(num_trajectories):
        # both its rewards come from outside
        sources = dict.fromkeys(SOURCES, 1.0)
        t = trajectory(i // GROUP, i % GROUP, sequence, reward_sources=sources)
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


def reward(t: ev.Trajectory, source: str) -> ev.Reward:
    """A score from outside."""
    return ev.Reward(
        event_id=f"{source}-{t.number}-{t.slot}",
        trajectory_id=t.trajectory_id,
        source=source,
        value=float(t.slot % 2),
        produced_at=t.produced_at + 5,
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
