"""Two ranks that save in shards: any of them killed in a save, on a disk and on S3."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranked_feed import RankedFeed
from s3_store import S3Store
from training_feed import Feed, ended, trained_ids

from streamrft.consumers.checkpoints import CheckpointStore
from streamrft.consumers.convert.convert import Request, convert
from streamrft.consumers.manifest import WEIGHTS
from streamrft.schemas import events as ev
from streamrft.streams.weights.object_storage import load_state_dict

NUM_GROUPS, NUM_STEPS = 7, 4
ENDED_BY_ANOTHER, SIGKILLED = 1, -signal.SIGKILL


def new_feed(folder: Path, model: Path, store: S3Store | None = None, **settings) -> RankedFeed:
    """Seven groups in four steps, each saved in full."""
    folder.mkdir(parents=True, exist_ok=True)
    if store is not None:
        settings["checkpoint_uri"] = f"{store.uri}/{folder.name}"
    environment = store.environment if store else {}
    feed = RankedFeed(folder, model, {"save_interval": 1, **settings}, environment)
    feed.write_groups(range(NUM_GROUPS))
    feed.write(ended(NUM_GROUPS), topic="tasks")
    return feed


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> RankedFeed:
    """Two ranks, never disturbed, that wait for each save."""
    feed = new_feed(tmp_path_factory.mktemp("quiet"), tiny_model_dir)
    assert feed.train() == 0, feed.said
    return feed


def assert_whole(feed: Feed, quiet: Feed) -> None:
    """The same cuts and steps, and every full checkpoint in shards that can be found."""
    assert trained_ids(feed.cuts) == trained_ids(quiet.cuts)
    assert [s.step for s in feed.read("train_steps", ev.TrainStep)] == [1, 2, 3, 4]
    uri = feed.trainer_settings().checkpoint_uri
    found = CheckpointStore(uri, "main").scan()
    full = {s.manifest.step: s for s in found if s.manifest.kind == "full"}
    assert full[NUM_STEPS].manifest.is_sharded
    files = [f for f in full[NUM_STEPS].manifest.files if f.endswith(".distcp")]
    assert files == ["actor/dcp/__0_0.distcp", "actor/dcp/__1_0.distcp"]


QUICK = pytest.param("rank_0.shards_written@2", SIGKILLED, id="rank 0 wrote its part")
KILLS = [
    QUICK,
    pytest.param("rank_1.shards_written", ENDED_BY_ANOTHER, id="rank 1 wrote its part of step 0"),
    pytest.param("rank_1.shards_written@3", ENDED_BY_ANOTHER, id="rank 1 wrote its part"),
    pytest.param("checkpoint.weights_written@2", SIGKILLED, id="weights are written"),
    pytest.param("checkpoint.state_written@2", SIGKILLED, id="all is written but the manifest"),
    pytest.param("checkpoint.manifest_written@2", SIGKILLED, id="the manifest is written"),
    pytest.param("checkpoint.published@2", SIGKILLED, id="it is published"),
]


def kill_and_go_on(feed: RankedFeed, quiet: RankedFeed, point: str, code: int) -> None:
    assert feed.train(kill_at=point) == code, feed.said
    assert (feed.folder / "killed").exists()
    assert feed.train() == 0, feed.said
    assert_whole(feed, quiet)


@pytest.mark.parametrize("point, code", [QUICK])
def test_team_killed_in_a_save_in_the_background_ends_like_a_quiet_one(
    point: str, code: int, quiet: RankedFeed, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, async_save=True)
    kill_and_go_on(feed, quiet, point, code)
    assert feed.digests == quiet.digests, "two ranks add up in the same order each time"
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_team_killed_in_an_upload_to_s3_ends_like_a_quiet_one_and_one_process_goes_on(
    quiet: RankedFeed, store: S3Store, tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, store, async_save=True)
    kill_and_go_on(feed, quiet, "rank_1.shards_written@2", ENDED_BY_ANOTHER)
    assert feed.digests == quiet.digests, "two ranks add up in the same order each time"
    feed.size = 1
    feed.write_groups(range(NUM_GROUPS, NUM_GROUPS + 2))
    feed.write(ended(NUM_GROUPS + 2), topic="tasks")
    assert feed.train() == 0, feed.said
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.step, last.kind) == (NUM_STEPS + 1, "full")


def test_copies_for_explorers_go_where_no_hugging_face_model_is_kept(
    tmp_path: Path, tiny_model_dir: Path
):
    feed = new_feed(tmp_path, tiny_model_dir, save_hf_checkpoint="never")
    assert feed.train() == 0, feed.said
    store = CheckpointStore(feed.trainer_settings().checkpoint_uri, "main")
    full = [s for s in store.scan() if s.manifest.kind == "full"]
    assert {s.manifest.step for s in full} == {0, 1, 2, 3, 4}
    for saved in full:
        assert WEIGHTS not in saved.manifest.files
        assert not (Path(saved.uri) / WEIGHTS).exists()
    announced = feed.read("checkpoints", ev.Checkpoint)
    assert {c.step for c in announced} == {0, 1, 2, 3, 4}, "explorers were told of each"
    (outcome,) = convert(Request(Path(full[0].uri)))
    assert outcome.state == "converted"
    # a fork begins with weights that explorers must have
    assert feed.train(resume_from="global_step_2", branch="again", total_steps=2) == 0, feed.said
    first = next(c for c in feed.read("checkpoints", ev.Checkpoint) if c.branch == "again")
    assert first.digest == feed.digests["main", 2]
    assert load_state_dict(first), "whose digest is that of the event, or it raises"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("point, code", KILLS)
def test_team_killed_anywhere_in_a_save_ends_like_a_quiet_one(
    point: str,
    code: int,
    is_async: bool,
    place: str,
    quiet: RankedFeed,
    store: S3Store,
    tmp_path: Path,
    tiny_model_dir: Path,
):
    feed = new_feed(tmp_path, tiny_model_dir, store if place == "s3" else None, async_save=is_async)
    kill_and_go_on(feed, quiet, point, code)
    assert feed.digests == quiet.digests, "two ranks add up in the same order each time"
