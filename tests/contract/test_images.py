"""What containers run beside the roles: a bucket is made, a process is judged by its heartbeats."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from config_files import BASE
from topic_events import append_events

from streamrft.consumers.checkpoints import CheckpointFailed, CheckpointStore, Contents
from streamrft.deploy.handover import with_model
from streamrft.deploy.images.bucket import make_bucket
from streamrft.deploy.images.healthy import complaint
from streamrft.deploy.plan import plan
from streamrft.deploy.roles import own_name
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError, StorageUnavailable
from streamrft.schemas.events import is_id
from streamrft.streams.process import Process

HOST = socket.gethostname()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE | {"checkpoint_root_dir": str(tmp_path / "runs")}))
    return path


@pytest.fixture
def run(config: Path):
    return plan(config)


@pytest.fixture
def log(run):
    log = run.open_log()
    log.ensure_topics(run.topic_specs(run.stages[0]))
    yield log
    log.close()


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def beat(state: str, host: str = HOST, age_s: float = 0.0) -> ev.Heartbeat:
    return ev.Heartbeat(
        process=f"join-{state}",
        role="join",
        state=state,
        waiting_for="tasks" if state == "idle" else "",
        host=host,
        pid=1,
        metrics={},
        produced_at=ev.now_ms() - int(age_s * 1000),
    )


def test_host_without_heartbeat_is_not_healthy(run, log):
    stage = run.stages[0]
    append_events(log, stage.topics, "heartbeats", beat("alive", host="elsewhere"))
    assert f"no heartbeat of {HOST}" in complaint(log, stage, HOST)


def test_host_is_judged_by_its_last_heartbeat(run, log):
    stage = run.stages[0]
    append_events(log, stage.topics, "heartbeats", beat("ended", age_s=5), beat("idle"))
    producer = log.producer()
    producer.send(stage.topics.name("heartbeats"), b"no heartbeat", key=b"x")
    producer.flush()
    assert complaint(log, stage, HOST) == ""
    append_events(log, stage.topics, "heartbeats", beat("ended"))
    assert complaint(log, stage, HOST) == "join-ended ended"


def test_check_of_a_container_ends_with_0_only_while_its_process_beats(config, run, log):
    command = [sys.executable, "-m", "streamrft.deploy.images.healthy", "--config", str(config)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    process = Process(log, run.stages[0].topics, name="join-0", role="join")
    process.alive()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bucket_is_made_once(memory):
    assert make_bucket("memory://bucket/folder")
    assert not make_bucket("memory://bucket/other")
    assert memory.isdir("/bucket")


def test_uri_without_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="names no bucket"):
        make_bucket("memory://")


def test_processes_of_different_hosts_have_different_names(monkeypatch):
    here = own_name("join")
    assert here.startswith("join-") and here.endswith(f"-{os.getpid()}") and is_id(here)
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a_b c")
    assert own_name("explore") == f"explorer-3f2a_b-c-{os.getpid()}"


def test_next_stage_starts_from_a_copy_of_weights_on_an_object_store(tmp_path, memory):
    stages = [{"stage_name": "first"}, {"stage_name": "second"}]
    path = tmp_path / "run.yaml"
    config = {"checkpoint_root_dir": str(tmp_path), "storage": {"uri": "memory://store"}}
    path.write_text(json.dumps(BASE | config | {"stages": stages}))
    run = plan(path)
    first, second = run.stages
    assert first.trainer is not None
    store = CheckpointStore(first.trainer.checkpoint_uri, "main")
    saved = store.save(Contents(model, lambda folder, into: {}, {}), step=3, epoch=1)
    log = run.open_log()
    log.ensure_topics(run.topic_specs(first))
    event = ev.Checkpoint(
        kind="full",
        branch="main",
        step=3,
        uri=saved.uri,
        digest=saved.manifest.digest,
        manifest_sha256=saved.manifest_sha256,
        epoch=1,
        produced_at=ev.now_ms(),
    )
    append_events(log, first.topics, "checkpoints", event)
    found = with_model(log, second)
    log.close()
    assert found.trainer is not None
    folder = Path(found.trainer.model_path)
    assert folder.is_relative_to(second.job_dir)
    assert (folder / "model.safetensors").read_bytes() == b"w"


def model(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"w")
    return hashlib.sha256(b"w").hexdigest()


def test_store_that_is_away_is_named_wherever_checkpoints_are_looked_for(memory, monkeypatch):
    store = CheckpointStore("memory://store/run", "main")
    store.save(Contents(model), step=1, epoch=1)

    def away(*args, **kwargs):
        raise ConnectionError("nobody there")

    for name in ("exists", "ls", "cat_file", "put_file"):
        monkeypatch.setattr(type(memory), name, away)
    with pytest.raises(StorageUnavailable, match="memory://store/run: .*nobody there"):
        store.scan()
    with pytest.raises(CheckpointFailed, match="nobody there"):
        store.save(Contents(model), step=2, epoch=1)
