"""A process on the log, driven by its parent through lines of JSON. See `log_process.Worker`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from streamrft.schemas.errors import Fenced, LogUnavailable
from streamrft.streams.log import Limits, Log, open_log


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def heard() -> bool:
    """Wait for the parent's next line; False when it is gone."""
    return bool(sys.stdin.readline())


def member(log: Log, group: str, name: str, *topics: str) -> None:
    """Read and commit for ever, saying what comes."""
    consumer = log.consumer(group=group, member=name)
    consumer.subscribe(
        topics,
        on_assign=lambda partitions: say(assigned=partitions),
        on_revoke=lambda partitions: say(revoked=partitions),
    )
    while True:
        records = consumer.poll(timeout_ms=50)
        try:
            consumer.commit(consumer.positions())
        except Fenced as error:
            say(fenced=str(error))
            continue
        for record in records:
            say(value=(record.value or b"").decode(), at=record.position)


def hesitant_member(log: Log, group: str, name: str, topic: str) -> None:
    """Read, wait for the parent, then commit, and say whether that worked."""
    consumer = log.consumer(group=group, member=name)
    consumer.subscribe([topic])
    while not (records := consumer.poll(timeout_ms=100)):
        continue
    say(holding=[record.position for record in records])
    heard()
    try:
        consumer.commit(consumer.positions())
        say(committed=True)
    except Fenced as error:
        say(fenced=str(error))
    while heard():
        consumer.poll(timeout_ms=100)
        say(assignment=consumer.assignment())


def copier(log: Log, group: str, name: str, source: str, target: str) -> None:
    """Copy for ever, in transactions; begin anew after a lost lease, as a restart would."""
    producer = log.producer()
    say(ready=True)
    while True:
        consumer = log.consumer(group=group, member=name)
        try:
            consumer.subscribe([source])
            while True:
                records = consumer.poll(7, timeout_ms=50)
                with producer.transaction():
                    for record in records:
                        producer.send(target, record.value, key=record.key)
                    producer.send_positions(consumer, consumer.positions())
        except (Fenced, LogUnavailable) as error:
            say(fenced=str(error))
            consumer.close()


def holder(log: Log, role: str, owner: str, ttl_ms: str, topic: str) -> None:
    """Take a role; at each line of the parent append under it, and say whether that worked."""
    lease = log.acquire(role, owner=owner, ttl_ms=int(ttl_ms), timeout_ms=120_000)
    producer = log.producer(fence=lease)
    say(epoch=lease.epoch)
    while heard():
        try:
            producer.send(topic, owner.encode())
            producer.flush()
            say(flushed=True)
        except Fenced as error:
            say(fenced=str(error))
        try:
            with producer.transaction():
                producer.send(topic, owner.encode())
            say(transacted=True)
        except Fenced as error:
            say(fenced=str(error))


def writer(log: Log, topic: str, name: str, side_file: str) -> None:
    """Append for ever; what was acknowledged is written down in `side_file` afterwards."""
    producer = log.producer()
    randomness = random.Random(name)
    num_sent = 0
    say(ready=True)
    with Path(side_file).open("a", buffering=1) as acknowledged:
        while True:
            values = [f"{name}:{num_sent + i}" for i in range(randomness.randint(1, 20))]
            num_sent += len(values)
            for value in values:
                producer.send(topic, value.encode() * randomness.randint(1, 50), key=value.encode())
            for value, position in zip(values, producer.flush(300_000), strict=True):
                acknowledged.write(json.dumps([value, position]) + "\n")


def main() -> None:
    url, limits, kind, *arguments = sys.argv[1:]
    log = open_log(url, Limits(**json.loads(limits)))
    {f.__name__: f for f in (member, hesitant_member, copier, holder, writer)}[kind](
        log, *arguments
    )


if __name__ == "__main__":
    main()
