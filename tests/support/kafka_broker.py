"""A real Apache Kafka for tests, from the jars of KAFKA_HOME, or one that runs already.

KAFKA_HOME is a folder with `libs/` (a downloaded Kafka, or its jars alone) and needs Java 17.
KAFKA_BOOTSTRAP_SERVERS names a broker that runs already, with `group.min.session.timeout.ms` of at
most 1500, as `make kafka` has it; tests that need one of their own (security, kills) then still ask
for KAFKA_HOME.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ports import free_port

from streamrft.deploy.kafka import broker

# on a busy machine; no test waits for it in vain
broker.START_S = 120.0
# quick sessions, retention and compaction, so that tests need not wait for them
QUICK = {
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "1500",
    "group.consumer.min.heartbeat.interval.ms": "50",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.assignment.interval.ms": "0",
    # not sooner: a broker that aborts while it starts loses the markers (seen in 4.3.1), and what
    # was open stays so for ever; its own default of 10 s lies behind any start
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "3000",
    "log.initial.task.delay.ms": "300",
    "log.retention.check.interval.ms": "300",
    "log.cleaner.backoff.ms": "100",
    # a broker that stood still for longer is without leaders until each partition has a new one,
    # which takes many seconds with the topics of a whole session
    "broker.session.timeout.ms": "60000",
    "broker.heartbeat.interval.ms": "500",
}
# of one that is killed: it may come back once its session has ended
MORTAL = {"broker.session.timeout.ms": "2000"}

REPLICATED = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
}


class Broker(broker.Broker):
    """The broker of `make kafka` on ports that were free, with settings for impatient tests."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        more_listeners: Mapping[str, int] | None = None,
    ) -> None:
        """`more_listeners`: port by name."""
        super().__init__(
            folder,
            Path(os.environ["KAFKA_HOME"]),
            free_port(),
            free_port(),
            {**QUICK, **(settings or {})},
            more_listeners,
        )

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Killed, since an orderly end waits seconds for clients and nobody reads the folder."""
        self.kill()


class Cluster:
    """Three nodes; a record is acknowledged once two have it, so one may be away."""

    def __init__(self, folder: Path) -> None:
        ports = [(free_port(), free_port()) for _ in range(3)]
        voters = ",".join(f"{i}@127.0.0.1:{port}" for i, (_, port) in enumerate(ports, 1))
        quorum = {**QUICK, **MORTAL, **REPLICATED, "controller.quorum.voters": voters}
        home = Path(os.environ["KAFKA_HOME"])
        self.nodes = {
            i: broker.Broker(folder / f"node{i}", home, *own, {**quorum, "node.id": str(i)})
            for i, own in enumerate(ports, 1)
        }
        self.url = "kafka://" + ",".join(node.address for node in self.nodes.values())

    def __enter__(self) -> Cluster:
        """Start all at once, since none serves alone."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(), self.nodes.values()))
        return self

    def leader(self, topic: str, partition: int = 0) -> broker.Broker:
        """The node that leads a partition now."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.url.removeprefix("kafka://")})
        found = admin.list_topics(topic, timeout=30).topics[topic]
        return self.nodes[found.partitions[partition].leader]

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()


def needs_kafka_home() -> None:
    """Skip a test that starts brokers of its own where it cannot."""
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("Kafka: KAFKA_HOME is not set, so no broker of its own can be started")
