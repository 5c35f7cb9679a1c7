"""The joins that are compared, each in a process of its own until it is ended.

Each first prints the CPU seconds that it spent before it began to read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal

from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics
from streamrft.streams.join_partition import PartitionJoin
from streamrft.streams.log import Record, open_log
from streamrft.streams.pipeline import Pipeline
from streamrft.streams.process import Process
from streamrft.streams.settings import StreamSettings

from .feed import raw_consumer, raw_producer
from .passes import cpu_s

BATCH = StreamSettings().batch_records
COMMIT_S, WAIT_S = 2.8, 0.5


def work_raw(
    servers: str, topics: Topics, *, is_eager: bool = False, has_state: bool = True
) -> None:
    """The fastest honest loop: at least once, outputs and state acknowledged before the commit.

    `is_eager` commits after each batch, as a transaction does; otherwise every 2.8 s, as Faust.
    """
    consumer, producer = raw_consumer(servers, f"{topics.namespace}.raw"), raw_producer(servers)
    settings, log = StreamSettings(), open_log(f"kafka://{servers}")
    pipeline, units = Pipeline(settings), {}
    names = {topic: topics.name(topic) for topic in ("experiences", "drops", "join_state")}
    committed_at = time.monotonic()
    say_ready()
    consumer.subscribe([topics.name("trajectories"), topics.name("rewards")])
    while True:
        touched: dict[int, dict[str, int]] = {}
        now = ev.now_ms()
        for message in consumer.consume(BATCH, WAIT_S):
            record = record_of(message)
            unit = units.get(record.partition)
            if unit is None:
                unit = units[record.partition] = PartitionJoin(
                    log, topics, settings, pipeline, partition=record.partition, reader="raw"
                )
                if not has_state:
                    unit.join.take_changes = dict
            unit.now_ms = now
            unit.take(record)
            touched.setdefault(record.partition, {})[record.topic] = record.offset + 1
        for partition, positions in touched.items():
            for out in units[partition].finish(positions).records:
                producer.produce(
                    names[out.topic], out.value, out.key, out.partition or 0, headers=[*out.headers]
                )
            producer.poll(0)
        if touched and (is_eager or time.monotonic() - committed_at > COMMIT_S):
            producer.flush()
            consumer.commit(asynchronous=False)
            committed_at = time.monotonic()


def say_ready() -> None:
    """Tell the parent what this process spent before it began to read."""
    print(json.dumps(cpu_s()), flush=True)


def record_of(message: Any) -> Record:
    """What the operators take."""
    if message.error() is not None:
        raise SystemExit(str(message.error()))
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
    )


def work_shell(servers: str, topics: Topics, engine: Literal["native", "faust"]) -> None:
    """As `streamrft join --engine ...` runs it."""
    from streamrft.streams.worker import run_join

    if engine == "faust":
        import streamrft.streams.faust.shell  # noqa: F401
    process = Process(open_log(f"kafka://{servers}"), topics, name="join-0", role="join")
    process.stop_on_signals()
    say_ready()
    run_join(process, StreamSettings(engine=engine))


JOINS: dict[str, Callable[[str, Topics], None]] = {
    "raw": work_raw,
    "raw_eager": lambda servers, topics: work_raw(servers, topics, is_eager=True),
    "raw_stateless": lambda servers, topics: work_raw(servers, topics, has_state=False),
    "native": lambda servers, topics: work_shell(servers, topics, "native"),
    "faust": lambda servers, topics: work_shell(servers, topics, "faust"),
}
