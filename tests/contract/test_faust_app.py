"""The join under Faust's own command, and the ways to choose a shell."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_run import CONFIG, append, new_cli, trajectory
from small_run import merge

from streamrft.deploy.plan import plan
from streamrft.deploy.views.place import opened
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError
from streamrft.streams.reading import read_events

WORDS = ["-m", "faust", "-A", "streamrft.streams.faust_app", "worker", "--without-web"]
DEADLINE_S = 90.0


@pytest.fixture
def config(tmp_path, kafka_url) -> Path:
    own = {
        "name": f"hosted-{secrets.token_hex(4)}",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "event_log": {"url": kafka_url},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(merge(CONFIG, own)))
    return path


def start(config: Path, output: Path) -> subprocess.Popen[bytes]:
    pytest.importorskip("faust")
    told = {"STREAMRFT_CONFIG": str(config), "STREAMRFT_NAME": "join-7"}
    with output.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *WORDS], stdout=out, stderr=out, env={**os.environ, **told}
        )


def test_fausts_own_command_joins_and_ends_in_order(config, tmp_path):
    run = plan(config)
    log = run.open_log()
    log.ensure_topics(run.topic_specs(run.stage(None)))
    log.close()
    with opened(str(config), None) as place:
        append(place, "trajectories", trajectory(0, 0), trajectory(0, 1))
        worker = start(config, tmp_path / "faust.log")
        try:
            deadline = time.monotonic() + DEADLINE_S
            while len(list(read_events(place.log, place.stage.topics, "experiences"))) < 2:
                assert worker.poll() is None, (tmp_path / "faust.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "faust.log").read_text()
                time.sleep(0.1)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0, (tmp_path / "faust.log").read_text()
        finally:
            worker.kill()
            worker.wait()
        beats = list(read_events(place.log, place.stage.topics, "heartbeats"))
    assert all(isinstance(b, ev.Heartbeat) and b.process == "join-7" for b in beats)
    assert beats[-1].state == "ended"


def test_what_ends_the_join_ends_fausts_command_with_its_reason(config, tmp_path):
    told = json.loads(config.read_text())
    config.write_text(json.dumps(merge(told, {"streams": {"filters": [{"name": "no_such"}]}})))
    worker = start(config, tmp_path / "faust.log")
    try:
        assert worker.wait(DEADLINE_S) != 0
    finally:
        worker.kill()
        worker.wait()
    assert "no_such" in (tmp_path / "faust.log").read_text()


def test_fausts_command_without_a_configuration_says_which_variable_is_missing(monkeypatch):
    pytest.importorskip("faust")
    from streamrft.deploy.roles import hosted_join

    monkeypatch.delenv("STREAMRFT_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="STREAMRFT_CONFIG: not set"):
        hosted_join()


def test_fausts_command_says_what_is_wrong_with_the_configuration_and_not_where_it_was_raised():
    pytest.importorskip("faust")
    told = {**os.environ, "STREAMRFT_CONFIG": "no-such.yaml"}
    done = subprocess.run(
        [sys.executable, *WORDS], env=told, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no-such.yaml: no such file"), done.stderr


@pytest.mark.parametrize(
    ("url", "engine", "expected"),
    [
        ("sqlite:///x/log.db", None, "native"),
        ("kafka://localhost:1", None, "faust"),
        ("kafka://localhost:1", "native", "native"),
        ("kafka://localhost:1", "faust", "faust"),
    ],
)
def test_the_shell_is_fausts_on_kafka_unless_named(tmp_path, capsys, url, engine, expected):
    cli = new_cli(tmp_path, capsys)
    cli.change(event_log={"url": url}, streams={"engine": engine})
    settings = plan(cli.config).stage(None).streams
    assert settings is not None and settings.engine == expected


def test_faust_on_the_embedded_log_is_refused_with_what_to_do(tmp_path, capsys):
    cli = new_cli(tmp_path, capsys)
    cli.change(streams={"engine": "faust"})
    code, _, err = cli.run("run", "--dry-run")
    assert code == 2
    assert "faust reads Kafka only" in err and "streams.engine: native" in err


def test_the_option_for_faust_on_the_embedded_log_is_refused_with_what_to_do(tmp_path, capsys):
    pytest.importorskip("faust")
    code, _, err = new_cli(tmp_path, capsys).run("join", "--engine", "faust")
    assert code == 2
    assert "--engine faust: this run's log is not Kafka" in err and "Leave the option out" in err


def test_a_missing_library_is_said_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("streamrft.streams.shell.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "faust", raising=False)
    cli = new_cli(tmp_path, capsys)
    cli.change(event_log={"url": "kafka://localhost:1"})
    code, _, err = cli.run("run")
    assert code == 1
    assert 'pip install "streamrft[faust]"' in err and "streams.engine: native" in err
