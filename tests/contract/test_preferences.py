"""A trainer alone on what lies on the log: pairs and verdicts of rewarded groups, also resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from training_feed import Feed, ended, group, trained_ids

from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings, OptimizerSettings
from streamrft.schemas import events as ev

FAST = OptimizerSettings(lr=1e-3)


@pytest.fixture
def feed_at(tmp_path: Path, tiny_model_dir: Path):
    made: list[Feed] = []

    def make(name: str, **algorithm) -> Feed:
        (tmp_path / name).mkdir()
        settings = {"algorithm": AlgorithmSettings(optimizer=FAST, **algorithm)}
        made.append(Feed(tmp_path / name, tiny_model_dir, settings))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def write_six(feed: Feed) -> None:
    """Six groups of two; the members of group 2 have the same reward."""
    for number in range(6):
        feed.write(*group(number, **({"reward": 0.5} if number == 2 else {})))
    feed.write(ended(6), topic="tasks")


def metrics(feed: Feed) -> list[dict[str, float]]:
    return [dict(s.metrics) for s in feed.read("train_steps", ev.TrainStep)]


def test_pairs_of_a_cut_are_trained_again_with_the_same_weights(feed_at):
    points = ("trainer.cut_published@2", "trainer.step_done@1")
    quiet, *killed = (feed_at(name, algorithm_type="dpo") for name in ("quiet", *points))
    for feed in (quiet, *killed):
        write_six(feed)
    assert quiet.train() == 0
    for point, feed in zip(points, killed, strict=True):
        assert feed.train(kill_at=point) == -9
        assert feed.train() == 0
        assert feed.digests == quiet.digests, point
        assert trained_ids(feed.cuts) == trained_ids(quiet.cuts) and len(quiet.cuts) == 3
    for feed in (quiet, *killed):
        drops = feed.read("drops", ev.Drop)
        assert sorted(d.trajectory_id for d in drops) == ["rows.2:0:a", "rows.2:1:a"]
        assert {(d.reason, d.detail) for d in drops} == {
            ("filtered", "no pair: every reward of the group is 0.5")
        }
    first, *_, last = metrics(quiet)
    assert first["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["actor/reward_margin"] != 0.0


def test_groups_that_prefer_nothing_are_counted_and_told(feed_at, caplog: pytest.LogCaptureFixture):
    feed = feed_at("collapsed")
    source = feed.open_source(in_pairs=True)
    for first, end in ((0, 7), (7, 9), (9, 15), (15, 20)):
        for number in range(first, end):
            feed.write(*group(number, reward=0.5))
        assert source.next_batch(0) is None
        assert f"; {end} came since the last batch without two different" in source.blocker(1)
    said = [m for m in caplog.messages if "no pair is made of them" in m]
    assert [m.split()[0] for m in said] == ["9", "20"], "again when it is twice as many"
    feed.write(*group(20))
    batch = source.next_batch(0)
    assert batch is not None
    source.take(batch)
    assert "came since" not in source.blocker(2)
    source.close()


def test_rewards_above_the_threshold_are_wanted_and_all_are_trained(feed_at):
    loss = FunctionSettings("kto", {"reward_threshold": 0.4, "undesirable_weight": 3.0})
    feed = feed_at("kto", algorithm_type="kto", policy_loss_fn=loss)
    write_six(feed)
    assert feed.train() == 0
    assert len(trained_ids(feed.cuts)) == 12 and not feed.read("drops", ev.Drop)
    # at the reference every sequence's loss is half its weight: of group 2 both are wanted
    assert [m["actor/pg_loss"] for m in metrics(feed)][0] == pytest.approx((1 + 3) / 4, abs=1e-5)
    assert all(m["actor/kl_to_reference"] >= 0 for m in metrics(feed))
