"""`make kafka`: where it takes Kafka from, and what it says when it cannot."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kafka_broker import Broker, needs_kafka_home
from ports import free_port
from waiting import until

from streamrft.deploy.kafka import broker, serve
from streamrft.deploy.kafka.broker import STOP_S, BrokerFailed

ROOT = Path(__file__).parents[2]
TELL = '#!/bin/sh\necho "$0 $@ PORT=$KAFKA_PORT KEY=$S3_ACCESS_KEY" >> {told}\n{then}\n'


class Bare:
    """`python -m deploy.kafka.serve` where no other programs are found than those it is given."""

    def __init__(self, folder: Path) -> None:
        self.told, self.folder, self.programs = folder / "told", folder / "kafka", folder / "bin"
        self.programs.mkdir()
        for name in ("mkdir", "touch"):
            found = shutil.which(name)
            assert found
            (self.programs / name).symlink_to(found)

    def has(self, name: str, then: str = "exit 0") -> None:
        """A program that tells how it was called."""
        path = self.programs / name
        path.write_text(TELL.format(told=self.told, then=then))
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.told.read_text().splitlines()

    def serve(self, port: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        words = ["-m", "deploy.kafka.serve", "--folder", str(self.folder)]
        return subprocess.run(
            [sys.executable, *words, "--port", str(port or free_port())],
            cwd=ROOT,
            env={"PATH": str(self.programs), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def bare(tmp_path):
    return Bare(tmp_path)


def test_nothing_to_start_it_with_says_what_to_install(bare):
    done = bare.serve()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for way in ("KAFKA_HOME", "Docker", "Maven", "Java 17"):
        assert way in done.stderr


def test_folder_without_jars_is_named(bare, tmp_path):
    done = bare.serve(KAFKA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"KAFKA_HOME is {tmp_path}, but {tmp_path}/libs has no kafka_*.jar" in done.stderr


def test_java_that_is_missing_is_named(bare, tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka_2.13-4.3.1.jar").touch()
    done = bare.serve(KAFKA_HOME=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Install Java 17 or newer, or set JAVA" in done.stderr


def test_port_that_is_taken_is_named(bare):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = bare.serve(port=port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} already" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(bare, tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka_2.13-4.3.1.jar").touch()
    bare.folder.touch()
    done = bare.serve(KAFKA_HOME=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{bare.folder} cannot be written" in done.stderr


def test_compose_starts_the_broker_alone_where_docker_runs(bare):
    bare.has("docker")
    port = free_port()
    done = bare.serve(port=port)
    assert done.returncode == 0, done.stderr
    assert f"event_log: kafka://127.0.0.1:{port}" in done.stdout
    last = bare.calls()[-1]
    assert f"compose up kafka PORT={port} KEY=unused" in last


def test_keys_of_the_store_stay_the_users_own(bare):
    bare.has("docker")
    bare.serve(S3_ACCESS_KEY="mine")
    assert "KEY=mine" in bare.calls()[-1]


def test_docker_without_a_daemon_is_passed_over(bare):
    bare.has("docker", then='[ "$1" != info ]')
    done = bare.serve()
    assert done.returncode == 1 and "Maven" in done.stderr


def test_maven_that_fails_is_said_and_leaves_nothing(bare):
    bare.has("java")
    bare.has("mvn", then="exit 1")
    done = bare.serve()
    assert done.returncode == 1
    assert "Maven could not fetch the jars" in done.stderr
    assert not (bare.folder / "jars").exists()


def test_maven_is_asked_once(bare):
    libs = bare.folder / "jars" / "libs"
    bare.has("java", then='echo "no broker today"; exit 1')
    bare.has("mvn", then=f"mkdir -p {libs}; touch {libs}/kafka_2.13-4.3.1.jar")
    for _ in range(2):
        done = bare.serve()
        assert done.returncode == 1
        assert "cannot be formatted" in done.stderr and "no broker today" in done.stderr
    asked = [line for line in bare.calls() if "mvn" in line]
    assert len(asked) == 1
    assert "dependency:copy-dependencies" in asked[0] and f"-DoutputDirectory={libs}" in asked[0]


@pytest.fixture
def hung(bare):
    """`java` and `mvn` never end."""
    for name in ("java", "mvn"):
        bare.has(name, then=f"exec {shutil.which('sleep')} 60")
    return bare


def test_maven_that_hangs_is_said_and_leaves_nothing(hung, monkeypatch):
    monkeypatch.setenv("PATH", str(hung.programs))
    monkeypatch.setattr(serve, "FETCH_S", 0.3)
    with pytest.raises(serve.CannotStart, match=r"Maven did not fetch the jars within 0\.3 s\. M"):
        serve.fetched(hung.folder / "jars")
    assert not (hung.folder / "jars").exists()


def test_java_that_hangs_is_said_and_the_folder_is_let_go(hung, monkeypatch):
    monkeypatch.setenv("JAVA", str(hung.programs / "java"))
    monkeypatch.setattr(broker, "START_S", 0.3)
    for _ in range(2):
        with pytest.raises(BrokerFailed, match=r"is not formatted after 0\.3 s\. See what holds"):
            broker.Broker(hung.folder, hung.folder, free_port(), free_port()).start()


DEAF = """\
#!{python}
import pathlib, re, signal, socket, sys, time
if "kafka.Kafka" not in sys.argv:
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
port = re.search(r"listeners=PLAINTEXT://127.0.0.1:(\\d+)", pathlib.Path(sys.argv[-1]).read_text())
server = socket.create_server(("127.0.0.1", int(port[1])))
print("Kafka Server started", flush=True)
time.sleep(600)
"""


def test_a_second_ctrl_c_leaves_no_broker_that_does_not_end(bare, tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka_2.13-4.3.1.jar").touch()
    java, port = bare.programs / "java", free_port()
    java.write_text(DEAF.format(python=sys.executable))
    java.chmod(0o755)
    words = ["-m", "deploy.kafka.serve", "--folder", str(bare.folder), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={"PATH": str(bare.programs), "KAFKA_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and "Kafka runs at" in process.stdout.readline()
    (broker,) = psutil.Process(process.pid).children()
    try:
        process.send_signal(signal.SIGINT)
        until(lambda: "asked to end" in (bare.folder / "broker.log").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S - 2) == 0
        assert not broker.is_running()
    finally:
        broker.kill() if broker.is_running() else None
        process.stdout.close()


def test_versions_of_kafka_agree():
    pom = (ROOT / "deploy" / "kafka" / "pom.xml").read_text()
    compose = (ROOT / "docker-compose.yml").read_text()
    (version,) = {
        line.split(">")[1].split("<")[0] for line in pom.splitlines() if "kafka.version>" in line
    }
    assert f"image: apache/kafka:{version}" in compose


def test_records_stay_over_a_restart_and_a_setting_that_is_refused_is_shown(tmp_path):
    needs_kafka_home()
    from streamrft.streams.log import Limits, Partition, TopicSpec, open_log

    broker = Broker(tmp_path / "broker").start()
    try:
        log = open_log(broker.url, Limits())
        log.ensure_topics([TopicSpec("kept", 1)])
        producer = log.producer()
        producer.send("kept", b"v", partition=0)
        producer.flush()
        log.close()
        with pytest.raises(BrokerFailed, match="another broker runs on .*/broker. End it, or name"):
            Broker(tmp_path / "broker").start()
        broker.stop()
        broker.start()
        log = open_log(broker.url, Limits())
        assert log.end_offsets([Partition("kept", 0)]) == {Partition("kept", 0): 1}
        log.close()
    finally:
        broker.stop()
    floor = {"group.consumer.session.timeout.ms": "100"}
    with pytest.raises(BrokerFailed, match="cannot be formatted(.|\n)*session.timeout.ms must be"):
        Broker(tmp_path / "other", floor).start()
