"""`make kafka`: one broker on loopback for trying things, until Ctrl-C. Its records stay.

From the jars of KAFKA_HOME where that is set; else the compose file's broker where docker runs;
else jars that Maven fetches once. Standard library only: any Python runs it,
`python3 -m deploy.kafka.serve` in the repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .broker import Broker, BrokerFailed, free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = 9092
FETCH_S = 900.0
# sessions as short as those of the clients: then the broker's own assignment is taken
LOCAL = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "10000",
    "group.consumer.session.timeout.ms": "10000",
    "group.consumer.min.heartbeat.interval.ms": "3000",
    "group.consumer.heartbeat.interval.ms": "3000",
    # a broker that was killed may be back at once
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
}
_READY = """\
Kafka runs at {address}; its records lie in {folder}. A run uses it with

  event_log: {url}

Ctrl-C ends it, a second one at once; `make kafka` then goes on with the same
records.{cleaning}
"""
_NO_WAY = """\
make kafka: no Kafka can be started here. Do one of these, then try again:
  - unpack a Kafka of https://kafka.apache.org/downloads, install Java 17 or newer, and set
    KAFKA_HOME to its folder (only libs/ is used);
  - start Docker with its compose plug-in;
  - install Maven and Java 17 or newer: the jars are then fetched once.
"""


class CannotStart(RuntimeError):
    """Nothing here can run a broker; the message says what to install."""


def main() -> int:
    """Serve until interrupted: 0. A broker that cannot be had, or ends by itself: 1."""
    parser = argparse.ArgumentParser(description="Serve one Kafka broker on loopback until Ctrl-C.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "kafka")
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return start(arguments.folder.resolve(), arguments.port)
    except CannotStart as error:
        print(error, file=sys.stderr)
        return 1
    except BrokerFailed as error:
        print(f"make kafka: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def start(folder: Path, port: int) -> int:
    """Choose where Kafka comes from and serve it in the foreground.

    Raises:
        CannotStart: no jars and nothing that fetches them. BrokerFailed: see `Broker`.
    """
    if not is_free(port):
        raise CannotStart(
            f"make kafka: something listens at 127.0.0.1:{port} already. End it, or name another "
            "port and folder: make kafka KAFKA_PORT=9192 KAFKA_FOLDER=runs/kafka-9192"
        )
    home = os.environ.get("KAFKA_HOME")
    if home:
        return serve(folder, home_of(Path(home)), port)
    if has_docker():
        become_compose(port)
    if shutil.which("mvn") and shutil.which(os.environ.get("JAVA", "java")):
        return serve(folder, fetched(folder / "jars"), port)
    raise CannotStart(_NO_WAY)


def serve(folder: Path, home: Path, port: int) -> int:
    """Run the jars of `home` until Ctrl-C or SIGTERM."""
    broker = Broker(folder, home, port, free_port(), LOCAL)
    try:
        broker.start()
        print(
            _READY.format(
                address=broker.address,
                url=broker.url,
                folder=folder,
                cleaning=" `make clean` removes them.",
            ),
            flush=True,
        )
        code = broker.wait()
        print(f"the broker ended by itself with {code}; see {folder}/broker.log", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        raise CannotStart(
            f"make kafka: {error.filename} is not here. Install Java 17 or newer, or set JAVA to "
            "its program."
        ) from error
    finally:
        _end(broker)


def _end(broker: Broker) -> None:
    """In order; another Ctrl-C in the meantime ends it at once."""
    try:
        broker.stop()
    except KeyboardInterrupt:
        broker.kill()


def is_free(port: int) -> bool:
    """Whether nobody listens at the port on loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def home_of(folder: Path) -> Path:
    """The folder, which must have the jars of a broker.

    Raises:
        CannotStart: it has not.
    """
    if not any((folder / "libs").glob("kafka_*.jar")):
        raise CannotStart(
            f"make kafka: KAFKA_HOME is {folder}, but {folder}/libs has no kafka_*.jar. Set it to "
            "an unpacked Kafka of https://kafka.apache.org/downloads."
        )
    return folder.resolve()


def has_docker() -> bool:
    """Whether the compose plug-in is here and a daemon answers."""
    if not shutil.which("docker"):
        return False
    for words in (["compose", "version"], ["info"]):
        try:
            done = subprocess.run(["docker", *words], capture_output=True, timeout=20)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0:
            return False
    return True


def become_compose(port: int) -> NoReturn:
    """Replace this process by compose with its broker alone; its volume keeps the records."""
    folder = "Docker's volume kafka (docker compose down --volumes removes it)"
    address = f"127.0.0.1:{port}"
    print(
        _READY.format(address=address, url=f"kafka://{address}", folder=folder, cleaning=""),
        flush=True,
    )
    # compose reads the whole file, so it asks for the store's keys though no store is started
    keys = {"S3_ACCESS_KEY": "unused", "S3_SECRET_KEY": "unused"}
    os.chdir(ROOT)
    words = ["docker", "compose", "up", "kafka"]
    os.execvpe("docker", words, {**keys, **os.environ, "KAFKA_PORT": str(port)})


def fetched(jars: Path) -> Path:
    """A folder whose `libs/` has the jars of pom.xml; Maven is asked once.

    Raises:
        CannotStart: Maven failed, or did not end within a quarter of an hour.
    """
    if not any((jars / "libs").glob("kafka_*.jar")):
        print(f"fetching the jars of Kafka into {jars}/libs", flush=True)
        words = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
        words.append(f"-DoutputDirectory={jars}/libs")
        try:
            has_failed = subprocess.run(words, timeout=FETCH_S).returncode != 0
            found = "could not fetch the jars (see above)"
        except subprocess.TimeoutExpired:
            has_failed, found = True, f"did not fetch the jars within {FETCH_S:g} s"
        if has_failed:
            shutil.rmtree(jars, ignore_errors=True)
            raise CannotStart(
                f"make kafka: Maven {found}. Mend its network, or set KAFKA_HOME to an unpacked "
                "Kafka."
            )
    return jars


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
