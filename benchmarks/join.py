"""Events a second and core through the join on one Kafka: raw loop, native shell, Faust shell.

All use the same operators on the same feed: trajectories of about 4 KB in groups of 8, two rewards
each, 5 % of all records twice, 4 partitions, written before. The cost of an event is the worker's
CPU time, user and system, from before it joins its group to its last counted batch. Beside them,
how fast records pass through the clients alone, and what writing the state costs.

The broker is started from KAFKA_HOME, or is the one at KAFKA_BOOTSTRAP_SERVERS.

    python benchmarks/join.py [--quick] [--json] [--only native,raw ...]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka import Consumer, KafkaError, TopicPartition
from workers.feed import NUM_PARTITIONS, build_feed, write
from workers.joins import JOINS
from workers.passes import PASSES

from streamrft.schemas.topics import Topics
from streamrft.streams.log import Log, TopicSpec, open_log, topic_specs
from streamrft.streams.outbox import COUNTERS_KEY

DEADLINE_S = 300.0
RATIOS = (
    ("native_over_raw", "join_raw", "join_native"),
    ("native_over_raw_eager", "join_raw_eager", "join_native"),
    ("faust_over_raw", "join_raw", "join_faust"),
    ("with_state_over_without", "join_raw", "join_raw_stateless"),
)


class Bench:
    """One broker, one feed; every run has topics of its own."""

    def __init__(self, servers: str, num_trajectories: int) -> None:
        self.servers, self.feed = servers, build_feed(num_trajectories)
        self.num_trajectories = sum(topic == "trajectories" for topic, _, _ in self.feed)
        self.log: Log = open_log(f"kafka://{servers}")

    @contextmanager
    def run(self, kind: str, topic: str | None = None) -> Iterator[tuple[Topics, Any]]:
        """Topics with the feed on them and a worker that reads it."""
        topics = Topics(f"bench-{secrets.token_hex(4)}.join", NUM_PARTITIONS)
        specs: list[TopicSpec] = topic_specs(topics)
        self.log.ensure_topics(specs)
        write(self.servers, topics, [f for f in self.feed if topic in (None, f[0])])
        words = [sys.executable, __file__, "--worker", kind, self.servers, topics.namespace]
        worker = subprocess.Popen(
            [*words, str(self.num_trajectories)], stdout=subprocess.PIPE, text=True
        )
        try:
            yield topics, worker
        finally:
            worker.terminate()
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
            for spec in specs:
                self.log.delete_topic(spec.name)

    def passed(self, kind: str) -> float:
        """CPU microseconds a trajectory that passes through."""
        with self.run(kind, "trajectories") as (_, worker):
            return self._said(worker)

    def _said(self, worker: Any) -> float:
        """The number that a worker prints."""
        line = worker.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {worker.wait(10)}; see above")
        return json.loads(line)

    def joined(self, kind: str) -> float:
        """CPU microseconds an event, by the counters that the worker's batches write."""
        with self.run(kind) as (topics, worker):
            process = psutil.Process(worker.pid)
            counts = dict.fromkeys(range(NUM_PARTITIONS), 0)
            begin = self._said(worker)
            for partition, num in self._counters(topics, worker):
                counts[partition] = num
                if sum(counts.values()) == len(self.feed):
                    return (spent_s(process) - begin) / len(self.feed) * 1e6
        raise AssertionError("unreachable: the counters end with an exception")

    def _counters(self, topics: Topics, worker: Any) -> Iterator[tuple[int, int]]:
        """(partition, events counted there), as soon as they are committed."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "bench",
                "fetch.wait.max.ms": 5,
                "enable.auto.commit": False,
            }
        )
        name = topics.name("join_state")
        consumer.assign([TopicPartition(name, p, 0) for p in range(NUM_PARTITIONS)])
        deadline = time.monotonic() + DEADLINE_S
        while True:
            if worker.poll() is not None:
                raise SystemExit(f"the worker ended with {worker.returncode}; see above")
            if time.monotonic() > deadline:
                raise SystemExit(f"not done after {DEADLINE_S:g} s")
            for message in consumer.consume(1_000, 0.02):
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise SystemExit(str(error))
                if error is None and message.key() == COUNTERS_KEY:
                    found = msgspec.msgpack.decode(message.value())
                    yield message.partition(), found["trajectories"] + found["rewards"]


def spent_s(process: psutil.Process) -> float:
    """User and system time of a worker."""
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def kafka() -> Iterator[str]:
    """Addresses of a broker: one that runs, or one started as the tests start theirs."""
    servers = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if servers:
        yield servers
        return
    if not os.environ.get("KAFKA_HOME"):
        raise SystemExit("Kafka: set KAFKA_HOME (a folder with libs/) or KAFKA_BOOTSTRAP_SERVERS")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from kafka_broker import Broker

    with tempfile.TemporaryDirectory() as folder:
        broker = Broker(Path(folder) / "broker").start()
        try:
            yield broker.address
        finally:
            broker.stop()


def measure(bench: Bench, repeats: int, only: set[str]) -> dict[str, float]:
    """Medians of interleaved runs, microseconds an event; ratios within a round."""
    kinds: dict[str, Callable[[], float]] = {}
    for name in JOINS:
        kinds[f"join_{name}"] = lambda name=name: bench.joined(name)
    for name in PASSES:
        for what in ("pass", "produce"):
            kinds[f"{what}_{name}"] = lambda kind=f"{what}_{name}": bench.passed(kind)
    kinds = {k: run for k, run in kinds.items() if not only or k in only}
    rounds = [{name: run() for name, run in kinds.items()} for _ in range(repeats)]
    found = {f"{name}_us": statistics.median(r[name] for r in rounds) for name in kinds}
    found |= {f"{name}_per_s_core": 1e6 / found[f"{name}_us"] for name in kinds}
    for ratio, above, below in RATIOS:
        if above in kinds and below in kinds:
            found[ratio] = statistics.median(r[above] / r[below] for r in rounds)
    return found


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", action="store_true", help="print one object: name -> value")
    parser.add_argument("--only", default="", help="names of rows, with commas between")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, servers, namespace, num = args.worker
        run_worker(kind, servers, Topics(namespace, NUM_PARTITIONS), int(num))
        return
    num, repeats = (5_000, 1) if args.quick else (20_000, 3)
    with kafka() as servers:
        bench = Bench(servers, num)
        found = measure(bench, repeats, set(filter(None, args.only.split(","))))
    found["num_events"], found["load"] = len(bench.feed), os.getloadavg()[0]
    if args.json:
        print(json.dumps(found))
        return
    size = statistics.median(len(v) for topic, _, v in bench.feed if topic == "trajectories")
    print(f"{len(bench.feed):,} events, trajectories of {size:,.0f} bytes; {repeats} rounds\n")
    for name, value in found.items():
        print(f"{name:32} {value:12,.2f}")


def run_worker(kind: str, servers: str, topics: Topics, num: int) -> None:
    """One worker in this process."""
    what, _, name = kind.partition("_")
    if what in ("pass", "produce"):
        PASSES[name](servers, topics, num, what == "produce")
    else:
        JOINS[kind](servers, topics)


if __name__ == "__main__":
    main()
