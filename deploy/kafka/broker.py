"""A single Kafka broker from a folder of jars: formatted once, started, seen to serve, ended.

Standard library only, so that it runs before anything is installed. `make kafka` serves one for
trying things (`serve.py`); the tests start theirs with quicker settings.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

START_S = 60.0
STOP_S = 20.0
CLUSTER_ID = "c3RyZWFtcmZ0LWxvY2FsAA"
# what one node must have: Kafka's own topics want three by default
SINGLE = {
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "auto.create.topics.enable": "false",
}
_LOG4J = """\
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


class BrokerFailed(RuntimeError):
    """The broker cannot be formatted or started; the message says why, or ends with its log."""


class Broker:
    """One node that is broker and controller, on loopback.

    new -> started <-> killed or stopped; what it acknowledged stays in the folder.
    """

    def __init__(
        self,
        folder: Path,
        home: Path,
        port: int,
        controller_port: int,
        settings: Mapping[str, str] | None = None,
        more_listeners: Mapping[str, int] | None = None,
    ) -> None:
        """Nothing is written before `start`.

        Args:
            folder: of this broker alone; made when missing.
            home: its folder `libs/` has the jars.
            port: of the clients.
            controller_port: of the controller, which only the broker itself uses.
            settings: broker properties; they win over all others.
            more_listeners: port by name of the security protocol.
        """
        self.folder, self.home, self.port = folder, home, port
        self.address = f"127.0.0.1:{port}"
        protocol = (settings or {}).get("inter.broker.listener.name", "PLAINTEXT")
        listeners = {protocol: port, **(more_listeners or {})}
        self._wanted = {
            **_addresses(listeners, controller_port),
            "process.roles": "broker,controller",
            "node.id": "1",
            "log.dirs": str(folder / "data"),
            **SINGLE,
            **(settings or {}),
        }
        self._properties = folder / "server.properties"
        self._log = folder / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """As `event_log:` names it."""
        return f"kafka://{self.address}"

    def start(self) -> Broker:
        """Start, or start again, and wait until it serves.

        Raises:
            BrokerFailed: the folder is another's or cannot be written; the broker ended, or does
                not serve within a minute.
        """
        if self._lock is not None:
            self._lock.close()  # of a broker that ended by itself
        self._lock = self._locked()
        try:
            self._start()
        except BrokerFailed:
            self.kill()
            raise
        return self

    def _start(self) -> None:
        self._properties.write_text("".join(f"{k}={v}\n" for k, v in self._wanted.items()))
        if not (self.folder / "data" / "meta.properties").exists():
            self._format()
        self._log.write_bytes(b"")
        with self._log.open("ab") as out, _undisturbed() as as_before:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._properties)],
                stdout=out,
                stderr=out,
                pass_fds=[self._lock.fileno()] if self._lock else [],
                preexec_fn=as_before,
            )
        deadline = time.monotonic() + START_S
        while not self._serves():
            if self._process.poll() is not None:
                raise BrokerFailed(f"the broker ended. {self._last_words()}")
            if time.monotonic() > deadline:
                raise BrokerFailed(f"no broker in {START_S:g} s. {self._last_words()}")
            time.sleep(0.05)

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL. What it acknowledged stays in the folder."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """An orderly end; no error when it does not run. Interrupted, `kill` ends it at once."""
        self._end(signal.SIGTERM)

    def _locked(self) -> IO[bytes]:
        """The folder, held by this process and the broker until both have ended.

        Kafka itself looks too late: a second broker spoils the first one's metadata.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("wb")
        except OSError as error:
            raise BrokerFailed(f"{self.folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise BrokerFailed(
                f"another broker runs on {self.folder}. End it, or name another folder: "
                f"make kafka KAFKA_PORT={self.port} KAFKA_FOLDER={self.folder}-{self.port}"
            ) from None
        return lock

    def _format(self) -> None:
        words = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c"]
        command = [*self._java(), *words, str(self._properties)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
        except subprocess.TimeoutExpired:
            raise BrokerFailed(
                f"{self.folder} is not formatted after {START_S:g} s. See what holds "
                f"{command[0]} up, the disk or its memory, and try again."
            ) from None
        if done.returncode != 0:
            words_of_java = f"{done.stdout}{done.stderr}"[-1500:]
            raise BrokerFailed(f"{self.folder} cannot be formatted: ...{words_of_java}")

    def _serves(self) -> bool:
        if "Kafka Server started" not in self._log.read_text(errors="replace"):
            return False
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _last_words(self) -> str:
        return f"{self._log} ends with:\n{self._log.read_text(errors='replace')[-3000:]}"

    def _java(self) -> list[str]:
        log4j = self.folder / "log4j2.yaml"
        log4j.write_text(_LOG4J)
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options += [f"-Dlog4j2.configurationFile={log4j}", f"-Dkafka.logs.dir={self.folder}"]
        return [os.environ.get("JAVA", "java"), *options, "-cp", f"{self.home}/libs/*"]

    def _end(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=STOP_S)
        self._process = None
        if self._lock is not None:
            self._lock.close()


@contextmanager
def _undisturbed() -> Iterator[Callable[[], object]]:
    """No Ctrl-C comes between a process and its name; gives what its child calls before exec."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    as_before = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        yield as_before
    finally:
        as_before()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _addresses(listeners: Mapping[str, int], controller_port: int) -> dict[str, str]:
    controller = f"127.0.0.1:{controller_port}"
    advertised = ",".join(f"{name}://127.0.0.1:{port}" for name, port in listeners.items())
    protocols = ["CONTROLLER:PLAINTEXT", *(f"{name}:{name}" for name in listeners)]
    return {
        "controller.quorum.voters": f"1@{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{advertised},CONTROLLER://{controller}",
        "advertised.listeners": advertised,
        "listener.security.protocol.map": ",".join(protocols),
    }
