"""A trainer killed with SIGKILL anywhere in a step, paused past its lease, or doubled."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from training_feed import Feed, ended, trained_ids, whole_feed
from waiting import until

from streamrft.schemas import events as ev

SIGKILLED = -signal.SIGKILL
SETTINGS = {"save_interval": 2}
NUM_GROUPS = 7


@dataclass(frozen=True)
class Case:
    """The trainer dies at `point` of `step`; of its four steps, the even ones are saved in full."""

    point: str
    step: int


CASES = (
    Case("checkpoint.weights_written", 0),
    Case("checkpoint.state_written", 0),
    Case("checkpoint.manifest_written", 0),
    Case("trainer.cut_published", 1),
    Case("trainer.step_done", 1),
    Case("checkpoint.weights_written", 1),
    Case("checkpoint.manifest_written", 1),
    Case("checkpoint.published", 1),
    Case("checkpoint.weights_written", 2),
    Case("checkpoint.state_written", 2),
    Case("checkpoint.manifest_written", 2),
    Case("checkpoint.published", 2),
    Case("checkpoint.committed", 2),
    Case("trainer.cut_published", 3),
    Case("trainer.step_done", 3),
    Case("trainer.cut_published", 4),
    Case("checkpoint.state_written", 4),
    Case("checkpoint.manifest_written", 4),
    Case("checkpoint.committed", 4),
)
# every case once, in three runs; each kill comes after the resume from the one before it
CHAINS = (CASES[0::3], CASES[1::3], CASES[2::3])


def new_feed(folder: Path, model: Path, **settings: object) -> Feed:
    return whole_feed(folder, model, NUM_GROUPS, settings={**SETTINGS, **settings})


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Feed:
    """The same run, never disturbed."""
    feed = new_feed(tmp_path_factory.mktemp("quiet"), tiny_model_dir)
    assert feed.train() == 0
    return feed


def assert_same_run(feed: Feed, quiet: Feed) -> None:
    assert [c.step for c in feed.cuts] == [1, 2, 3, 4]
    assert trained_ids(feed.cuts) == trained_ids(quiet.cuts)
    assert len(set(trained_ids(feed.cuts))) == 2 * NUM_GROUPS
    assert [s.step for s in feed.read("train_steps", ev.TrainStep)] == [1, 2, 3, 4]
    assert feed.digests == quiet.digests
    assert not list((feed.folder / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: f"{c[0].point}@{c[0].step} and on")
def test_trainer_killed_again_and_again_ends_with_the_weights_of_a_quiet_one(
    chain: tuple[Case, ...], quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir)
    for case in chain:
        assert feed.train(kill_at=f"{case.point}@{case.step}") == SIGKILLED, case
        (tmp_path / "killed").unlink()
    assert feed.train() == 0
    assert_same_run(feed, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.point}@{c.step}")
def test_killed_trainer_ends_with_the_weights_of_a_quiet_one(
    case: Case, quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir)
    assert feed.train(kill_at=f"{case.point}@{case.step}") == SIGKILLED
    assert feed.train() == 0
    assert_same_run(feed, quiet)


def test_trainer_killed_in_every_step_still_ends_like_a_quiet_one(
    quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, save_interval=0)
    for step in range(1, 5):
        assert feed.train(kill_at=f"trainer.step_done@{step}") == SIGKILLED
        (tmp_path / "killed").unlink()
    assert feed.train() == 0
    assert_same_run(feed, quiet)


@contextmanager
def writing_nothing(log: Path) -> Iterator[None]:
    """Nobody writes inside: a process that is stopped there does not keep the lock of the file."""
    connection = sqlite3.connect(log, timeout=60, isolation_level=None)
    connection.execute("begin immediate")
    try:
        yield
    finally:
        connection.close()


def test_paused_trainer_publishes_nothing_after_its_successor(
    quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = Feed(tmp_path, tiny_model_dir, {**SETTINGS, "lease_ms": 600})
    feed.write_groups(range(5))
    paused = feed.start()
    until(lambda: ("main", 2) in feed.digests, "a checkpoint of step 2")
    assert paused.pid is not None
    with writing_nothing(feed.folder / "log.db"):
        os.kill(paused.pid, signal.SIGSTOP)
    try:
        feed.write_groups(range(5, NUM_GROUPS))
        feed.write(ended(NUM_GROUPS), topic="tasks")
        assert feed.train() == 0
        before = feed.read("train_steps", ev.Cut, ev.TrainStep), feed.read("checkpoints", ev.Event)
    finally:
        os.kill(paused.pid, signal.SIGCONT)
        paused.join(180)
    assert paused.exitcode == 1, "the old trainer must fail by its lease"
    after = feed.read("train_steps", ev.Cut, ev.TrainStep), feed.read("checkpoints", ev.Event)
    assert after == before
    assert_same_run(feed, quiet)


def test_stopped_trainer_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, tiny_model_dir: Path):
    feed = Feed(tmp_path, tiny_model_dir)
    feed.write_groups(range(5))
    running = feed.start()
    until(lambda: ("main", 2) in feed.digests, "a checkpoint of step 2")
    running.terminate()
    running.join(180)
    assert running.exitcode == 0
    newest = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (newest.step, newest.kind) == (2, "full")
