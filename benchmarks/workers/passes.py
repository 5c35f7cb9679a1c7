"""Records that only pass through a client, each way in a process of its own; nothing compressed."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrft.schemas.topics import Topics

from .feed import raw_consumer, raw_producer

BATCH, WAIT_S = 500, 0.5


def pass_confluent(servers: str, topics: Topics, num: int, produces: bool) -> None:
    """Consume trajectories, and produce them to another topic or not."""
    consumer = raw_consumer(servers, f"{topics.namespace}.pass")
    producer = raw_producer(servers, "none")
    meter = Meter(num)
    consumer.subscribe([topics.name("trajectories")])
    while not meter.is_done:
        messages = consumer.consume(BATCH, WAIT_S)
        if produces:
            for message in messages:
                producer.produce(
                    topics.name("experiences"), message.value(), message.key(), message.partition()
                )
            producer.flush()
        meter.count(len(messages))


def pass_aiokafka(servers: str, topics: Topics, num: int, produces: bool) -> None:
    """The client that Faust stands on."""
    import asyncio

    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    async def run() -> None:
        consumer = AIOKafkaConsumer(
            topics.name("trajectories"),
            bootstrap_servers=servers,
            group_id=f"{topics.namespace}.pass",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        producer = AIOKafkaProducer(
            bootstrap_servers=servers, linger_ms=5, max_batch_size=2**20, acks="all"
        )
        meter = Meter(num)
        await consumer.start()
        await producer.start()
        while not meter.is_done:
            found = await consumer.getmany(timeout_ms=int(WAIT_S * 1000), max_records=BATCH)
            for record in (record for records in found.values() for record in records):
                if produces:
                    await producer.send(
                        topics.name("experiences"), record.value, record.key, record.partition
                    )
            if produces:
                await producer.flush()
            meter.count(sum(map(len, found.values())))
        await producer.stop()
        await consumer.stop()

    asyncio.run(run())


def pass_faust(servers: str, topics: Topics, num: int, produces: bool) -> None:
    """An agent that does nothing but, where asked, send on."""
    import asyncio

    import faust

    app = faust.App(
        f"{topics.namespace}.pass",
        broker=f"kafka://{servers}",
        value_serializer="raw",
        key_serializer="raw",
        topic_disable_leader=True,
        producer_max_batch_size=2**20,
        producer_linger=0.005,
        web_enabled=False,
        datadir=Path(tempfile.gettempdir()) / f"streamrft-faust-{os.getuid()}",
    )
    raw = {"key_type": bytes, "value_type": bytes, "key_serializer": "raw"}
    source = app.topic(topics.name("trajectories"), value_serializer="raw", **raw)
    target = app.topic(topics.name("experiences"), value_serializer="raw", **raw)
    meter = Meter(num)

    @app.agent(source)
    async def agent(stream: Any) -> None:
        async for event in stream.events():
            if produces:
                await target.send(key=event.key, value=event.value)
            meter.count(1)

    async def run() -> None:
        await app.start()
        while not meter.is_done:
            await asyncio.sleep(0.01)
        await app.stop()

    asyncio.run(run())


PASSES: dict[str, Callable[[str, Topics, int, bool], None]] = {
    "confluent": pass_confluent,
    "aiokafka": pass_aiokafka,
    "faust": pass_faust,
}


class Meter:
    """CPU of this process from here to the last event; prints microseconds an event."""

    def __init__(self, num: int) -> None:
        self.num, self.counted, self._begin = num, 0, cpu_s()

    @property
    def is_done(self) -> bool:
        """Whether all came."""
        return self.counted >= self.num

    def count(self, num: int) -> None:
        """That many came."""
        was_done = self.is_done
        self.counted += num
        if self.is_done and not was_done:
            print(json.dumps((cpu_s() - self._begin) / self.counted * 1e6), flush=True)


def cpu_s() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
