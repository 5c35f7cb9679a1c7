"""A trainer killed in the middle of a save: synchronous or not, on a disk and on S3."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from s3_store import S3Store
from training_feed import Feed, trained_ids, whole_feed

from streamrft.schemas import events as ev

SIGKILLED = -signal.SIGKILL
NUM_GROUPS, NUM_STEPS = 7, 4
NUM_KILLS = 20


def new_feed(folder: Path, model: Path, store: S3Store | None = None, **settings: object) -> Feed:
    """Seven groups in four steps, each saved in full."""
    if store is not None:
        settings["checkpoint_uri"] = f"{store.uri}/{folder.name}"
    environment = store.environment if store else {}
    told = {"save_interval": 1, **settings}
    return whole_feed(folder, model, NUM_GROUPS, settings=told, environment=environment)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Feed:
    """The same run, never disturbed and never in the background."""
    feed = new_feed(tmp_path_factory.mktemp("quiet"), tiny_model_dir)
    assert feed.train() == 0
    return feed


@pytest.fixture(scope="module")
def store():
    made = S3Store()
    yield made
    made.close()


def files(feed: Feed, store: S3Store | None) -> list[str]:
    """Paths of what is saved, from the folder of checkpoints on."""
    if store is not None:
        begin = f"{feed.folder.name}/"
        return [n.removeprefix(begin) for n in store.names if n.startswith(begin)]
    root = feed.folder / "checkpoints"
    try:
        return [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    except FileNotFoundError:  # renamed while it was looked into
        return []


def half_written(names: list[str]) -> set[str]:
    """Folders without a manifest."""
    folders = {n.split("/")[0] for n in names if "/" in n}
    return {f for f in folders if f.endswith(".tmp") or f"{f}/manifest.json" not in names}


def assert_same_run(feed: Feed, quiet: Feed, store: S3Store | None) -> None:
    assert trained_ids(feed.cuts) == trained_ids(quiet.cuts)
    steps = [s.step for s in feed.read("train_steps", ev.TrainStep)]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert feed.digests == quiet.digests
    assert not half_written(files(feed, store))
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.step, last.kind) == (NUM_STEPS, "full")


def kill_in_a_save(feed: Feed, store: S3Store | None, step: int, delay_s: float) -> bool:
    """Kill a trainer `delay_s` after the save of a step began; whether it was in its middle."""
    running = feed.start()
    deadline = time.monotonic() + 180
    while not any(n.startswith(f"global_step_{step}.") for n in _listed(feed, store)):
        assert running.is_alive() and time.monotonic() < deadline, feed.said
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(running.pid, signal.SIGKILL)
    running.join()
    return bool(half_written(files(feed, store))) or _is_unannounced(feed, step)


def _listed(feed: Feed, store: S3Store | None) -> list[str]:
    if store is not None:
        return files(feed, store)
    root = feed.folder / "checkpoints"
    # a save that was over between two looks has its name, and counts
    return [f"{n}." for n in os.listdir(root)] if root.is_dir() else []


def _is_unannounced(feed: Feed, step: int) -> bool:
    announced = feed.read("checkpoints", ev.Checkpoint)
    return not any(c.step == step and c.kind == "full" for c in announced)


@pytest.mark.parametrize("point", ["state_written", "manifest_written", "published"])
def test_trainer_killed_while_it_saves_in_the_background_ends_like_a_quiet_one(
    point: str, quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, async_save=True)
    assert feed.train(kill_at=f"checkpoint.{point}@2") == SIGKILLED
    assert feed.train() == 0
    assert_same_run(feed, quiet, None)


def test_trainer_killed_in_an_upload_to_s3_ends_like_a_quiet_one(
    quiet: Feed, store: S3Store, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, store, async_save=True)
    with store.silent_after(f"{tmp_path.name}/global_step_2.") as has_come:
        running = feed.start()
        assert has_come.wait(180), feed.said
        running.kill()
        running.join()
    assert half_written(files(feed, store))
    assert feed.train() == 0
    assert_same_run(feed, quiet, store)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_twenty_kills_in_saves_all_end_like_a_quiet_run(
    place: str,
    is_async: bool,
    quiet: Feed,
    store: S3Store,
    tmp_path: Path,
    tiny_model_dir: Path,
):
    where = store if place == "s3" else None
    num_in_the_middle = 0
    for seed in range(NUM_KILLS):
        seeded = random.Random(seed)
        folder = tmp_path / f"{place}-{is_async}-{seed}"
        feed = new_feed(folder, tiny_model_dir, where, async_save=is_async)
        step, delay_s = seeded.randint(1, NUM_STEPS), seeded.uniform(0, 0.08)
        num_in_the_middle += kill_in_a_save(feed, where, step, delay_s)
        assert feed.train() == 0, f"seed {seed}: {feed.said}"
        assert_same_run(feed, quiet, where)
        feed.close()
    assert num_in_the_middle >= NUM_KILLS // 2, f"only {num_in_the_middle} kills met a save"
