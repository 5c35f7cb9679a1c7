"""Checkpoints on S3, by moto's server: whole runs, a store that goes away, large files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import FORKED
from s3_store import S3Store
from tiny_learner import learner
from training_feed import Feed, ended, trained_ids
from waiting import until

from streamrft.consumers.checkpoints import (
    CheckpointBroken,
    CheckpointFailed,
    CheckpointStore,
    Contents,
)
from streamrft.consumers.manifest import FileEntry
from streamrft.consumers.states import OPTIMIZER_FILE
from streamrft.schemas import events as ev
from streamrft.schemas.errors import StorageUnavailable

NUM_GROUPS = 6
MIB = 2**20


def new_feed(folder: Path, model: Path, store: S3Store | None, **settings: object) -> Feed:
    if store is not None:
        settings["checkpoint_uri"] = f"{store.uri}/{folder.parent.name}"
    folder.mkdir(exist_ok=True)
    environment = store.environment if store else {}
    return Feed(folder, model, {"save_interval": 1, **settings}, environment)


def test_run_saves_to_s3_and_another_goes_on_from_there(
    store: S3Store, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path / "s3", tiny_model_dir, store, async_save=True)
    feed.write_groups(range(4))
    assert feed.train(total_steps=2) == 0, feed.said
    feed.write_groups(range(4, NUM_GROUPS))
    feed.write(ended(NUM_GROUPS), topic="tasks")
    assert feed.train() == 0, feed.said
    quiet = new_feed(tmp_path / "disk", tiny_model_dir, None)
    quiet.write_groups(range(NUM_GROUPS))
    quiet.write(ended(NUM_GROUPS), topic="tasks")
    assert quiet.train() == 0
    assert trained_ids(feed.cuts) == trained_ids(quiet.cuts)
    assert feed.digests == quiet.digests
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.kind, last.uri[: len(store.uri)]) == ("full", store.uri)
    for kind in ("checkpointed", "state_dict"):
        assert f"{tmp_path.name}/latest_{kind}_iteration.txt" in store.names


def test_store_that_goes_away_is_said_and_training_goes_on(
    store: S3Store, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path / "s3", tiny_model_dir, store, async_save=True)
    feed.write_groups(range(2))
    running = feed.start()
    try:
        until(lambda: ("main", 1) in feed.digests, "version 1")
        store.stop()
        feed.write_groups(range(2, 4))
        until(lambda: len(feed.read("train_steps", ev.TrainStep)) == 2, "a step without a store")
        failures = lambda: feed.read("checkpoints", ev.SaveFailed)  # noqa: E731
        until(failures, "the reason")
        assert {(f.step, f.kind) for f in failures()} <= {(1, "full"), (2, "full")}
        assert "does not answer" in failures()[0].reason
        store.start()
        until(lambda: ("main", 2) in feed.digests, "the owed save")
        feed.write_groups(range(4, NUM_GROUPS))
        feed.write(ended(NUM_GROUPS), topic="tasks")
        running.join(150)
        assert running.exitcode == 0, feed.said
    finally:
        running.kill()
        running.join()
    assert {step for _, step in feed.digests} >= {0, 1, 2, 3}
    found = CheckpointStore(f"{store.uri}/{tmp_path.name}", "main").scan()
    assert found[0].manifest.step == 3 and found[0].manifest.kind == "full"


def test_large_file_goes_up_in_parts_and_comes_down_the_same(store: S3Store, tmp_path: Path):
    size = 101 * MIB

    def write_states(folder: Path, into: str) -> dict[str, FileEntry]:
        with (folder / "actor" / "optim_world_size_1_rank_0.pt").open("wb") as file:
            file.seek(size - 4)
            file.write(b"last")
        return {}

    saved = CheckpointStore(f"{store.uri}/large", "main").save(
        Contents(_model, write_states, {}), step=1, epoch=1
    )
    path = f"large/{saved.name}/actor/optim_world_size_1_rank_0.pt"
    assert store.num_parts(path) == 3
    folder = CheckpointStore(f"{store.uri}/large", "main").fetch(saved, tmp_path)
    fetched = folder / "actor" / "optim_world_size_1_rank_0.pt"
    assert fetched.stat().st_size == size


def save_in_parts(uri: str, step: int, environment: dict[str, str]) -> None:
    """Save 60 MiB in parts of 5 MiB, the smallest that S3 takes."""
    os.environ.update(environment)
    import s3fs.core

    s3fs.core.calculate_chunksize = lambda size, chunksize=None: 5 * MIB

    def write_states(folder: Path, into: str) -> dict[str, FileEntry]:
        (folder / "actor" / OPTIMIZER_FILE).write_bytes(bytes([step]) * 60 * MIB)
        return {}

    CheckpointStore(uri, "main").save(Contents(_model, write_states, {}), step=step, epoch=step)


def test_kill_in_the_parts_of_an_upload_leaves_the_checkpoint_before_and_no_parts(
    store: S3Store, tmp_path: Path
):
    uri = f"{store.uri}/killed"
    arguments = (uri, 2, store.environment)
    CheckpointStore(uri, "main").save(
        Contents(_model, lambda folder, into: {}, {}), step=1, epoch=1
    )
    process = FORKED.Process(target=save_in_parts, args=arguments)
    process.start()
    until(lambda: any(store.uploads.values()), "a part")
    process.kill()
    process.join(60)
    killed = f"killed/global_step_2.epoch_2/actor/{OPTIMIZER_FILE}"
    assert store.uploads.keys() == {killed} and killed not in store.names
    other = "killed/claims/of-a-living-explorer"
    store.begin_upload(other)
    after = CheckpointStore(uri, "main")
    assert [s.manifest.step for s in after.scan()] == [1]
    after.remove_staged()
    assert store.uploads.keys() == {other}, "parts of others are left alone"
    assert not [n for n in store.names if n.startswith("killed/global_step_2")]
    process = FORKED.Process(target=save_in_parts, args=arguments)
    process.start()
    process.join(150)
    assert process.exitcode == 0
    assert store.num_parts(killed) == 12
    assert [s.manifest.step for s in after.scan()] == [2, 1]


def test_shards_of_a_store_that_is_away_are_not_taken_for_broken(
    store: S3Store, tiny_model_dir: Path
):
    one = learner(tiny_model_dir)
    extra = {"optimizers": {"actor": one.optimizer_state()}, "rng": one.rng_state()}
    with pytest.raises(CheckpointBroken, match="does not exist"):
        one.load_shards(store.uri, "nothing", {}, extra)
    store.stop()
    with pytest.raises(StorageUnavailable, match="does not answer"):
        one.load_shards(store.uri, "nothing", {}, extra)
    store.start()


def test_store_away_in_an_upload_leaves_nothing_that_is_taken(store: S3Store, tmp_path: Path):
    def away() -> None:
        store.stop()

    place = CheckpointStore(f"{store.uri}/away", "main")
    contents = Contents(_model, lambda folder, into: {}, {})
    place.save(contents, step=1, epoch=1)
    with pytest.raises(CheckpointFailed, match="global_step_2 is not written.*does not answer"):
        place.save(
            Contents(_model, lambda folder, into: {}, {}), step=2, epoch=1, before_place=away
        )
    store.start()
    assert [s.manifest.step for s in place.scan()] == [1]


def _model(folder: Path) -> str:
    import hashlib

    (folder / "model.safetensors").write_bytes(b"weights")
    return hashlib.sha256(b"weights").hexdigest()
