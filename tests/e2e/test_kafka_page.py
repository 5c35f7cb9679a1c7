"""docs/kafka.md can be typed: its first commands run, on a broker that `make kafka` started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kafka_broker import needs_kafka_home
from ports import free_port
from shell import typed

from streamrft.deploy.config.load import load
from streamrft.deploy.config.read import known_paths
from streamrft.deploy.config.schema import Config
from streamrft.streams.kafka.options import SECRETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kafka.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """What `make kafka` says once it serves."""
    needs_kafka_home()
    port = free_port()
    command = ["make", "kafka", f"KAFKA_PORT={port}", f"PYTHON={sys.executable}"]
    command.append(f"KAFKA_FOLDER={tmp_path / 'kafka'}")
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, f"make kafka ended: {said}"
            said += line
        yield said
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        process.stdout.close()


def test_first_commands_of_the_page_train_on_kafka(served, tmp_path):
    (commands,) = [b for b in blocks("bash") if "streamrft run" in b]
    (url,) = re.findall(r"event_log: (kafka://\S+)", served)
    assert "kafka://127.0.0.1:9092" in commands
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = typed(commands.replace("kafka://127.0.0.1:9092", url), tmp_path)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "step 3 of 3" in done.stdout and "balanced" in done.stdout
    assert not list((tmp_path / "runs").rglob("log.db"))


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_of_the_page_is_a_configuration_that_loads(text, tmp_path):
    small = {
        "project": "p",
        "name": "n",
        "model": {"model_path": "m"},
        "algorithm": {"algorithm_type": "grpo"},
        "buffer": {"explorer_input": {"taskset": {"name": "rows", "path": "rows.jsonl"}}},
        "rewards": {"human": {"deadline": "3d"}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small) + text)
    (stage,) = load(path).stages
    assert stage.config.event_log.url.startswith("kafka://")


def test_keys_of_the_page_exist():
    named = set(re.findall(r"`((?:event_log|streams|storage|model)\.[a-z_.]+)`", PAGE))
    known = set(known_paths(Config))
    assert named
    for key in named:
        assert key in known or key.startswith(("event_log.options.", "event_log.retention")), key


def test_page_names_every_secret_of_kafka():
    assert set(re.findall(r"STREAMRFT_KAFKA_\w+", PAGE)) == set(SECRETS)


def test_page_is_read_in_some_minutes():
    assert PAGE.count("\n") < 200
