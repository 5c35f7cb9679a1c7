"""A real Apache Kafka for tests, from the jars of KAFKA_HOME, or one that runs already.

KAFKA_HOME is a folder with `libs/` (a downloaded Kafka, or its jars alone) and needs Java 17.
KAFKA_BOOTSTRAP_SERVERS names a broker that runs already; tests that need one of their own
(security, kills) then still ask for KAFKA_HOME.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

START_S = 60.0
CLUSTER_ID = "c3RyZWFtcmZ0LXRlc3QAAA"
# quick sessions, retention and compaction, so that tests need not wait for them
QUICK = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "1500",
    "group.consumer.min.heartbeat.interval.ms": "50",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.assignment.interval.ms": "0",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
    "log.initial.task.delay.ms": "300",
    "log.retention.check.interval.ms": "300",
    "log.cleaner.backoff.ms": "100",
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
}
SINGLE = {
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "2",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "auto.create.topics.enable": "false",
}


class Broker:
    """One node that is broker and controller. started <-> killed or stopped; data stays."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        more_listeners: Mapping[str, int] | None = None,
    ) -> None:
        """Choose ports and write the settings. `more_listeners`: port by name."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        listener = "PLAINTEXT"
        protocol = (settings or {}).get("inter.broker.listener.name", listener)
        ports = {protocol: self.port, **(more_listeners or {})}
        advertised = ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
        wanted = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{advertised},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": advertised,
            "listener.security.protocol.map": ",".join(
                ["CONTROLLER:PLAINTEXT", *(f"{name}:{name}" for name in ports)]
            ),
            "log.dirs": str(folder / "data"),
            **SINGLE,
            **QUICK,
            **(settings or {}),
        }
        lines = [f"{name}={value}\n" for name, value in wanted.items()]
        self._properties = folder / "server.properties"
        self._properties.write_text("".join(lines))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """As `event_log:` names it."""
        return f"kafka://{self.address}"

    def start(self) -> Broker:
        """Start, or start again, and wait until it serves."""
        if not (self.folder / "data" / "meta.properties").exists():
            words = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c"]
            done = subprocess.run(
                [*self._java(), *words, str(self._properties)], capture_output=True, text=True
            )
            assert done.returncode == 0, f"no format: {done.stdout}{done.stderr}"
        log = self.folder / "broker.log"
        log.write_bytes(b"")
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._properties)], stdout=out, stderr=out
            )
        deadline = time.monotonic() + START_S
        while not self._serves(log):
            assert self._process.poll() is None, f"the broker ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, (
                f"no broker in {START_S} s: {log.read_text()[-3000:]}"
            )
            time.sleep(0.05)
        return self

    def _serves(self, log: Path) -> bool:
        if "Kafka Server started" not in log.read_text(errors="replace"):
            return False
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _java(self) -> list[str]:
        home = Path(os.environ["KAFKA_HOME"])
        log4j = self.folder / "log4j2.yaml"
        log4j.write_text(LOG4J)
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options += [f"-Dlog4j2.configurationFile={log4j}", f"-Dkafka.logs.dir={self.folder}"]
        return [os.environ.get("JAVA", "java"), *options, "-cp", f"{home}/libs/*"]

    def kill(self) -> None:
        """SIGKILL. What it acknowledged stays in the folder."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """An orderly end; no error when it does not run."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)


def needs_kafka_home() -> None:
    """Skip a test that starts brokers of its own where it cannot."""
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("Kafka: KAFKA_HOME is not set, so no broker of its own can be started")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LOG4J = """\
Configuration:
  status: WARN
  Appenders:
    Console:
      name: STDOUT
      target: SYSTEM_OUT
      PatternLayout:
        pattern: "%d %p %c{1} %m%n"
  Loggers:
    Root:
      level: INFO
      AppenderRef:
        - ref: STDOUT
"""
