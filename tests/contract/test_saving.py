"""Saves in the background, saves that fail, and what old checkpoints stay for."""

from __future__ import annotations

import resource
import runpy
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from training_feed import TOPICS, Feed, ended, trained_ids
from waiting import until

from streamrft.consumers import saving
from streamrft.consumers.background import BackgroundSave
from streamrft.consumers.checkpoints import CheckpointFailed, CheckpointStore
from streamrft.consumers.lease import LeaseKeeper
from streamrft.consumers.manifest import FileEntry
from streamrft.consumers.peers import Peers
from streamrft.consumers.saving import Saver
from streamrft.consumers.settings import AlgorithmSettings, TrainerSettings
from streamrft.consumers.states import OPTIMIZER_FILE, ShardedStates, States, states_of
from streamrft.deploy.handover import failed_save
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError, Fenced, LogUnavailable
from streamrft.streams.process import Process

NUM_GROUPS = 6
BUILD = Path(__file__).parents[2] / "examples" / "quickstart" / "build.py"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Feed:
    """Three steps, saved while training waits."""
    feed = Feed(tmp_path_factory.mktemp("quiet"), tiny_model_dir, {"save_interval": 1})
    finish(feed, 0)
    return feed


@pytest.fixture(scope="module")
def larger_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files are larger than the log is, so that a limit stops them alone."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    runpy.run_path(str(BUILD))["save_model"](folder, seed=0, hidden=256, heads=4)
    return folder


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, larger_model_dir: Path) -> Feed:
    """As `quiet`, with the larger model."""
    folder = tmp_path_factory.mktemp("larger-quiet")
    feed = Feed(folder, larger_model_dir, {"save_interval": 1})
    finish(feed, 0)
    return feed


def make_room(running: Any) -> None:
    """The disk that was full for a process is so no more."""
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def too_little_room(quiet: Feed) -> dict[str, int]:
    """For the optimiser's file after a step; for weights, the log and step 0 there is enough."""
    folder = quiet.folder / "checkpoints" / "global_step_1" / "actor"
    return {"max_file_bytes": (folder / OPTIMIZER_FILE).stat().st_size - 1}


def finish(feed: Feed, first: int) -> None:
    feed.write_groups(range(first, NUM_GROUPS))
    feed.write(ended(NUM_GROUPS), topic="tasks")
    assert feed.train() == 0, feed.said


def full_steps(feed: Feed) -> list[int]:
    return sorted({c.step for c in feed.read("checkpoints", ev.Checkpoint) if c.kind == "full"})


def saved_files(feed: Feed, step: int) -> dict[str, str]:
    found = CheckpointStore(str(feed.folder / "checkpoints"), "main").scan()
    (saved,) = [s for s in found if s.manifest.step == step]
    assert saved.manifest.kind == "full"
    return {path: entry.sha256 for path, entry in saved.manifest.files.items()}


def test_what_is_written_in_the_background_is_what_waiting_would_have_written(
    quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    feed = Feed(tmp_path, tiny_model_dir, {"save_interval": 1, "async_save": True})
    finish(feed, 0)
    assert full_steps(feed) == full_steps(quiet) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert saved_files(feed, step) == saved_files(quiet, step)


def test_whole_model_is_copied_where_no_explorer_waits_for_it(
    quiet: Feed, tmp_path: Path, tiny_model_dir: Path
):
    settings = {"save_interval": 1, "sync_interval": 5, "async_save": True}
    feed = Feed(tmp_path, tiny_model_dir, settings)
    finish(feed, 0)
    assert [c.kind for c in feed.read("checkpoints", ev.Checkpoint)] == ["full"] * 4
    for step in (1, 2, 3):
        assert saved_files(feed, step) == saved_files(quiet, step)


def test_weights_are_announced_before_the_rest_is_written(tmp_path: Path, tiny_model_dir: Path):
    feed = Feed(tmp_path, tiny_model_dir, {"save_interval": 1, "async_save": True})
    finish(feed, 0)
    kinds = [(c.step, c.kind) for c in feed.read("checkpoints", ev.Checkpoint)]
    assert kinds == [(0, "full"), *((s, k) for s in (1, 2, 3) for k in ("weights", "full"))]


def test_copy_is_not_changed_by_training_on(tiny_model_dir: Path):
    from torch import zeros

    class Learner:
        num_ranks = 1

        def __init__(self) -> None:
            self.moments = zeros(2)

        def optimizer_state(self):
            return {"state": {0: {"exp_avg": self.moments}}, "param_groups": [{"betas": (0.9, 1)}]}

        def rng_state(self):
            return [{"cpu": self.moments}]

        def critic_config(self):
            return None

    learner = Learner()
    copy = states_of(learner, 1, copies=True)  # type: ignore[arg-type]
    learner.moments += 1
    assert isinstance(copy, States)
    assert copy.optimizer["state"][0]["exp_avg"].tolist() == [0, 0]
    assert copy.optimizer["param_groups"] == [{"betas": (0.9, 1)}]
    assert copy.rng[0]["cpu"].tolist() == [0, 0]


def test_ranks_on_machines_that_share_no_disk_are_told_so(tmp_path: Path):
    class Learner:
        def write_shards(self, place):
            return {"actor/dcp/__1_0.distcp": FileEntry(1, "")}

    (tmp_path / "actor").mkdir()
    states = ShardedStates(Learner(), {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"__1_0\.distcp, did not come here.*storage\.uri"):
        states.write(tmp_path, "")
    assert states.write(tmp_path, "s3://bucket/step").keys() == {"actor/dcp/__1_0.distcp"}


def test_whatever_keeps_a_rank_from_writing_is_told_to_the_one_that_waits(tmp_path: Path):
    from torch import ones

    from streamrft.consumers.learning.ranks import Ranks
    from streamrft.consumers.learning.sharded import Place, ShardSave

    save = ShardSave({"actor": {"weight": ones(2)}}, Ranks(), step=1, copies=True)
    save._rank = 1  # rank 0 moves what it wrote itself
    (copy,) = map(weakref.ref, save._parts["actor"].values.values())
    save.begin(Place(str(tmp_path), "nosuch://bucket/step"))
    until(lambda: save.written is not None, "what rank 1 wrote")
    until(lambda: copy() is None, "its copies are let go")
    assert save.written is not None and save.written.results == {}
    assert "shards of rank 1: nosuch://bucket/step: Protocol not known" in save.written.error


def test_error_of_the_thread_is_raised_by_whoever_lands_the_save():
    def fail():
        raise CheckpointFailed("no space left")

    save = BackgroundSave(3, {}, fail)
    assert save.wait(60)
    with pytest.raises(CheckpointFailed, match="no space"):
        save.result()


def test_save_is_not_done_before_its_thread_is():
    gate = threading.Event()
    save = BackgroundSave(3, {}, lambda: gate.wait(60))  # type: ignore[arg-type, return-value]
    assert not save.is_done and not save.wait(0.01)
    gate.set()
    assert save.wait(60)


@pytest.mark.parametrize("async_save", [False, True], ids=["synchronous", "asynchronous"])
def test_full_disk_is_said_and_training_goes_on(
    async_save: bool, larger: Feed, tmp_path: Path, larger_model_dir: Path
):
    feed = Feed(tmp_path, larger_model_dir, {"save_interval": 1, "async_save": async_save})
    feed.write_groups(range(4))
    running = feed.start(**too_little_room(larger))
    try:
        until(lambda: len(feed.read("train_steps", ev.TrainStep)) == 2, "two steps")
        until(lambda: len(failures(feed)) > 1, "the reasons")
        assert full_steps(feed) == [0]
        # once for each step, however often it is tried
        assert [(f.step, f.kind) for f in failures(feed)] == [(1, "full"), (2, "full")]
        assert all("File too large" in f.reason for f in failures(feed)), failures(feed)
        assert failed_save(feed.log, TOPICS) == failures(feed)[-1]
        beats = lambda: [b.waiting_for for b in feed.read("heartbeats", ev.Heartbeat)]  # noqa: E731
        until(lambda: any("storage of checkpoints" in b for b in beats()), "a heartbeat of it")
        make_room(running)
        until(lambda: 2 in full_steps(feed), "the owed save")
        assert failed_save(feed.log, TOPICS) is None
        feed.write_groups(range(4, NUM_GROUPS))
        feed.write(ended(NUM_GROUPS), topic="tasks")
        running.join(150)
        assert running.exitcode == 0, feed.said
    finally:
        running.kill()
        running.join()
    assert trained_ids(feed.cuts) == trained_ids(larger.cuts)
    # a version that was never whole is not announced; the others are those of a quiet run
    assert {("main", 0), ("main", 2), ("main", 3)} <= feed.digests.keys()
    assert feed.digests.items() <= larger.digests.items()
    assert not list((feed.folder / "checkpoints").glob("*.tmp"))


def failures(feed: Feed) -> list[ev.SaveFailed]:
    return feed.read("checkpoints", ev.SaveFailed)


@pytest.mark.parametrize("is_mended", [True, False], ids=["in time", "too late"])
def test_last_save_is_tried_until_its_time_is_over(
    is_mended: bool,
    larger: Feed,
    tmp_path: Path,
    larger_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    feed = Feed(tmp_path, larger_model_dir, {"max_read_timeout_ms": 60_000 if is_mended else 2_000})
    feed.write_groups(range(NUM_GROUPS))
    feed.write(ended(NUM_GROUPS), topic="tasks")
    running = feed.start(**too_little_room(larger))
    try:
        until(lambda: failures(feed), "the reason")
        if is_mended:
            until(lambda: "storage of checkpoints" in last_word(feed), "a heartbeat of it")
            make_room(running)
        running.join(150)
        assert running.exitcode == (0 if is_mended else 1), feed.said
    finally:
        running.kill()
        running.join()
    assert full_steps(feed) == ([0, 3] if is_mended else [0])
    assert ("CheckpointFailed: step 3 is not saved after" in feed.said) is not is_mended
    assert feed.train() == 0, "it goes on from the cuts"
    assert feed.digests.items() <= larger.digests.items() and full_steps(feed) == [0, 3]


def last_word(feed: Feed) -> str:
    return feed.read("heartbeats", ev.Heartbeat)[-1].waiting_for


def test_checkpoint_that_an_explorer_loads_is_not_deleted(tmp_path: Path, tiny_model_dir: Path):
    feed = Feed(tmp_path, tiny_model_dir, {"save_interval": 1, "max_checkpoints_to_keep": 1})
    feed.write_groups(range(2))
    running = feed.start()
    try:
        until(lambda: ("main", 1) in feed.digests, "step 1")
        feed.write(_beat(loading=1), topic="heartbeats")
        feed.write_groups(range(2, 16))
        feed.write(ended(16), topic="tasks")
        running.join(150)
        assert running.exitcode == 0, feed.said
    finally:
        running.kill()
        running.join()
    assert kept_steps(feed) == [1, 5, 6, 7, 8]


def test_checkpoint_that_a_branch_begins_at_is_not_deleted(tmp_path: Path, tiny_model_dir: Path):
    feed = Feed(tmp_path, tiny_model_dir, {"save_interval": 1, "max_checkpoints_to_keep": 1})
    feed.write_groups(range(4))
    assert feed.train(total_steps=1) == 0
    on_a = {"resume_from": "global_step_0", "branch": "a"}
    assert feed.train(total_steps=2, **on_a) == 0, feed.said
    feed.write(ev.Branch(branch="b", parent="a", step=1, produced_at=1), topic="checkpoints")
    feed.write_groups(range(4, 16))
    assert feed.train(total_steps=8, **on_a) == 0, feed.said
    assert kept_steps(feed, "a") == [1, 5, 6, 7, 8]


def kept_steps(feed: Feed, branch: str = "main") -> list[int]:
    found = CheckpointStore(str(feed.folder / "checkpoints"), branch).scan()
    return sorted(s.manifest.step for s in found)


def _beat(loading: float) -> ev.Heartbeat:
    return ev.Heartbeat(
        process="explorer-0",
        role="explorer",
        state="alive",
        waiting_for="",
        host="here",
        pid=1,
        metrics={"loading_version": loading},
        produced_at=1,
    )


def test_word_of_an_explorer_is_taken_until_it_loads_no_more(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    feed = Feed(tmp_path, tiny_model_dir)
    peers = Peers(feed.log, TOPICS)
    assert peers.loading() == set()
    feed.write(_beat(loading=7), topic="heartbeats")
    until(lambda: peers.loading() == {7}, "the heartbeat")
    with monkeypatch.context() as away:
        away.setattr(peers._consumer, "poll", unanswered)
        assert peers.loading() == peers.loading() == {7}, "nobody said otherwise"
    assert caplog.text.count("heartbeats of others are not read: no broker") == 1
    feed.write(ev.Heartbeat(**{**_fields(_beat(7)), "metrics": {}}), topic="heartbeats")
    until(lambda: peers.loading() == set(), "the next one")
    peers.close()
    feed.close()


def unanswered(*_: object) -> None:
    raise LogUnavailable("no broker answers")


def _fields(beat: ev.Heartbeat) -> dict[str, object]:
    return {name: getattr(beat, name) for name in beat.__struct_fields__}


# --- one save at a time


@dataclass
class Keeper:
    """A lease whose owner says what it waits for, and then need not wait much longer."""

    is_stopping: bool = False
    said: list[str] = field(default_factory=list)
    heard: threading.Event = field(default_factory=threading.Event)

    def say(self, waiting_for: str) -> None:
        self.said.append(waiting_for)
        self.heard.set()

    def waiting(self):
        return nullcontext()


@dataclass
class Announcements:
    """An announcer that keeps what it is told."""

    epoch: int = 1
    events: list[ev.Event] = field(default_factory=list)

    def publish(self, topic: str, event: ev.Event) -> None:
        self.events.append(event)


def saver_that_writes(folder: Path, keeper: Keeper, until_set: threading.Event, error: Exception):
    """A saver whose save of step 3 is in the background until told, and fails then."""
    store = CheckpointStore(str(folder / "checkpoints"), "main")
    settings = TrainerSettings("model", "checkpoints", AlgorithmSettings(), save_interval=3)
    parts: list[Any] = [Announcements(), keeper, None, None]
    saver = Saver(settings, store, *parts, announced={})

    def write():
        assert until_set.wait(60)
        raise error

    saver._writing = BackgroundSave(3, {}, write)
    return saver


def test_next_save_waits_for_the_one_before_and_says_so(tmp_path: Path):
    keeper = Keeper()
    saver = saver_that_writes(tmp_path, keeper, keeper.heard, Fenced("a successor holds it"))
    saver.settle()
    assert saver._writing is not None, "nobody waited for it"
    with pytest.raises(Fenced):
        saver.after_step(6, is_last=False)
    assert set(keeper.said) == {f"the save of step 3 to {tmp_path / 'checkpoints'}"}


def test_failed_save_is_owed_and_named_by_who_waits(tmp_path: Path):
    gate = threading.Event()
    saver = saver_that_writes(tmp_path, Keeper(), gate, CheckpointFailed("no space left"))
    gate.set()
    until(lambda: saver._writing and saver._writing.is_done, "the thread")
    assert saver.retry(3) == "the storage of checkpoints: no space left"
    (event,) = saver.announcer.events  # type: ignore[attr-defined]
    assert (event.step, event.kind, event.reason) == (3, "full", "no space left")


@pytest.mark.parametrize("is_rolling", [True, False])
def test_what_is_owed_stays_as_long_as_what_was_asked_for(tmp_path: Path, is_rolling: bool):
    """A save that shortens a resume is no lasting one because it came later."""
    gate, begun = threading.Event(), saving._Due(True, is_rolling=is_rolling)
    saver = saver_that_writes(tmp_path, Keeper(), gate, CheckpointFailed("no space left"))
    saver._begun = begun
    gate.set()
    until(lambda: saver._writing and saver._writing.is_done, "the thread")
    saver.settle()
    assert saver._due(4, False) == begun and saver._due(6, False) == saving._Due(True)


def test_stop_does_not_wait_long_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saving, "STOP_S", 0.3)
    gate = threading.Event()
    saver = saver_that_writes(tmp_path, Keeper(is_stopping=True), gate, OSError("late"))
    saver.shorten_resume(4)
    assert saver._writing is not None, "it was given up, not waited for"
    # ranks write one save at a time
    with pytest.raises(CheckpointFailed, match="step 4 is not saved: the save before it"):
        saver.finish(4)
    gate.set()


def test_folder_gets_no_name_after_a_successor(tmp_path: Path, tiny_model_dir: Path):
    feed = Feed(tmp_path, tiny_model_dir)
    process = Process(feed.log, TOPICS, name="old", role="trainer")
    lease = process.acquire("trainer", 60_000)
    assert lease is not None
    with LeaseKeeper(process, lease) as keeper:
        keeper.prove_apart()
        feed.log.release(lease)
        successor = process.acquire("trainer", 60_000)
        assert successor is not None and successor.epoch > lease.epoch
        with pytest.raises(Fenced):
            keeper.prove_apart()
    feed.close()
