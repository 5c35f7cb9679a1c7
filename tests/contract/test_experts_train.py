"""A trainer that mixes an expert's rows into every step, killed and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_feed import Feed, ended, trained_ids

from streamrft.consumers.settings import (
    AlgorithmSettings,
    FunctionSettings,
    OptimizerSettings,
    SftSource,
)
from streamrft.schemas import events as ev


@pytest.fixture
def feed_at(tmp_path: Path, tiny_model_dir: Path):
    """A feed of eight groups, and a file of seven rows of which one is bad."""
    path = tmp_path / "expert.jsonl"
    rows = [{"prompt": f"{i}+1?", "response": str(i + 1)} for i in range(7)]
    path.write_text("".join(json.dumps(r if r != rows[3] else {}) + "\n" for r in rows))
    made: list[Feed] = []

    def make(name: str, kind: str = "mix", **loss: float) -> Feed:
        (tmp_path / name).mkdir()
        algorithm = AlgorithmSettings(
            kind,
            policy_loss_fn=FunctionSettings(kind, loss) if loss else None,
            kl_loss_fn=FunctionSettings("none"),
            optimizer=OptimizerSettings(lr=1e-3),
        )
        settings = {
            "algorithm": algorithm,
            "experts": SftSource(str(path), shuffle=False),
            "expert_rows": 4,
        }
        feed = Feed(tmp_path / name, tiny_model_dir, settings)
        feed.write_groups(range(8))
        feed.write(ended(8), topic="tasks")
        made.append(feed)
        return feed

    yield make
    for feed in made:
        feed.close()


def steps(feed: Feed) -> list[ev.TrainStep]:
    return sorted(feed.read("train_steps", ev.TrainStep), key=lambda s: s.step)


@pytest.mark.parametrize("kill_at", ["trainer.cut_published@3", "trainer.step_done@4"])
def test_a_step_that_is_trained_again_has_the_same_rows_again(feed_at, kill_at: str):
    quiet, killed = feed_at("quiet"), feed_at("killed")
    assert quiet.train() == 0, quiet.said
    assert killed.train(save_interval=2, kill_at=kill_at) == -9
    assert killed.train(save_interval=2) == 0, killed.said
    assert killed.digests == quiet.digests and len(quiet.digests) == 5
    for feed in (quiet, killed):
        assert [s.num_experiences for s in steps(feed)] == [4] * 4, "rows are none"
        assert [s.metrics["num_expert_rows"] for s in steps(feed)] == [4] * 4
        assert [len(c.members) for c in feed.cuts] == [4] * 4
        assert len(set(trained_ids(feed.cuts))) == 16
        letters = {x.offset for x in feed.read("dead_letters", ev.DeadLetter)}
        assert letters == {3}


def test_rows_draw_the_policy_to_the_expert_and_metrics_are_of_rollouts(feed_at):
    mixed, plain = feed_at("mixed", mu=0.9), feed_at("plain", "grpo")
    assert mixed.train() == 0 and plain.train(expert_rows=0, experts=None) == 0
    with_rows, without = ([dict(s.metrics) for s in steps(f)] for f in (mixed, plain))
    for a, b in zip(with_rows, without, strict=True):
        for name in ("reward/mean", "response_length/mean", "num_groups", "sample/staleness_max"):
            assert a[name] == b[name]
        assert a["actor/mu"] == pytest.approx(0.9)
    for name in ("logprob_gap_mean", "logprob_gap_max", "logprob_gap_kl", "logprob_gap_k3",
                 "ppo_kl", "pg_clipfrac"):  # fmt: skip
        of_rows, of_none = (m[0][f"actor/{name}"] for m in (with_rows, without))
        assert of_rows == pytest.approx(of_none, rel=1e-4), name
    assert without[0]["actor/ppo_kl"] != 0
    # an untrained model takes every byte for as likely: ln 263 a token, times mu
    assert with_rows[0]["actor/pg_loss"] == pytest.approx(0.9 * 5.57, abs=0.1)
    assert with_rows[-1]["actor/pg_loss"] < with_rows[0]["actor/pg_loss"] - 0.2
