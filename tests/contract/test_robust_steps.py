"""What could poison a step comes from the log, step after step, and harms no weight."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from training_feed import TOPICS, Feed, ended, experience, group

from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings, OptimizerSettings
from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev

LIMIT = 512  # positions of the tiny model
MASKED, ALONE, EQUAL, NAN, FULL, PLAIN = range(6)


def at_the_limit(e: ev.Experience) -> ev.Experience:
    """The same with as many tokens as the model takes, cut by the engine."""
    trajectory = codec.decode(e.trajectory, ev.Trajectory)
    trained = LIMIT - 4
    sequence = msgspec.structs.replace(
        trajectory.sequences[0],
        tokens=arrays.pack_ints(np.arange(LIMIT) % 200 + 10),
        loss_mask=arrays.pack_mask([0] * 4 + [1] * trained),
        logprobs=arrays.pack_floats([0.0] * 4 + [-5.5] * trained),
        policy_versions=arrays.pack_runs([0] * trained),
        truncated=True,
    )
    whole = msgspec.structs.replace(trajectory, sequences=[sequence], finish_reason="length")
    return msgspec.structs.replace(
        e, trajectory=codec.encode(whole), num_tokens=LIMIT, num_trained_tokens=trained
    )


def rewarded(members: list[ev.GroupMember], reward: float) -> list[ev.GroupMember]:
    return [msgspec.structs.replace(m, reward=reward) for m in members]


def write_nan(feed: Feed, e: ev.Experience) -> None:
    """As a careless program would write it: our own writers refuse such a reward."""
    marked = codec.encode(msgspec.structs.replace(e, reward=0.123456789))
    value = marked.replace(struct.pack("<d", 0.123456789), struct.pack("<d", math.nan), 1)
    assert value != marked
    producer = feed.log.producer()
    producer.send(TOPICS.name("experiences"), value, key=e.group_id.encode())
    producer.flush()


def write(feed: Feed) -> None:
    feed.write(*group(MASKED, loss_mask=bytes(8)))
    one = experience(ALONE, 0, reward=0.7, group_experiences=1)
    feed.write(msgspec.structs.replace(one, group=rewarded(one.group[:1], 0.7)))
    equal = group(EQUAL, reward=0.5)
    feed.write(*(msgspec.structs.replace(e, group=rewarded(e.group, 0.5)) for e in equal))
    feed.write(experience(NAN, 0))
    write_nan(feed, experience(NAN, 1))
    feed.write(*(at_the_limit(e) for e in group(FULL)), *group(PLAIN))
    feed.write(ended(6), topic="tasks")


@pytest.fixture
def feed(tmp_path: Path, tiny_model_dir: Path):
    made = Feed(tmp_path, tiny_model_dir)
    write(made)
    yield made
    made.close()


def algorithm(kind: str) -> AlgorithmSettings:
    return AlgorithmSettings(
        kind, kl_loss_fn=FunctionSettings("none"), optimizer=OptimizerSettings(lr=1e-3)
    )


def metrics_by_number(feed: Feed) -> dict[int, dict[str, float]]:
    """Of the step that trained each group; steps train one group here."""
    steps = {s.step: dict(s.metrics) for s in feed.read("train_steps", ev.TrainStep)}
    return {int(c.members[0].trajectory_id.split(":")[0].split(".")[1]): steps[c.step]
            for c in feed.cuts}  # fmt: skip


def drops_by_number(feed: Feed) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for d in feed.read("drops", ev.Drop):
        found.setdefault(d.number, []).append(d.reason)
    return {number: sorted(reasons) for number, reasons in found.items()}


def check_whole(feed: Feed) -> None:
    """Every number that was said and every weight that was saved is one."""
    for metrics in metrics_by_number(feed).values():
        assert all(math.isfinite(v) for v in metrics.values())
    last = max(feed.digests)[1]
    folder = feed.folder / "checkpoints" / f"global_step_{last}" / "actor" / "huggingface"
    weights = load_file(folder / "model.safetensors")
    assert all(np.isfinite(w).all() for w in weights.values())


def test_steps_of_a_group_algorithm_skip_what_says_nothing_and_train_the_rest(feed: Feed):
    assert feed.train(algorithm=algorithm("grpo"), batch_groups=1) == 0, feed.said
    found = metrics_by_number(feed)
    skipped = {n: m["actor/skipped_updates"] for n, m in found.items()}
    assert skipped == {MASKED: 1, ALONE: 0, EQUAL: 1, NAN: 0, FULL: 0, PLAIN: 0}
    assert drops_by_number(feed) == {NAN: ["invalid"]}
    assert found[FULL]["response_length/clip_ratio"] == 1.0
    assert found[FULL]["response_length/trained_mean"] == LIMIT - 4
    check_whole(feed)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_steps_of_preferences_do_so_too(feed: Feed, kind: str):
    assert feed.train(algorithm=algorithm(kind), batch_groups=1) == 0, feed.said
    found = metrics_by_number(feed)
    drops = drops_by_number(feed)
    if kind == "dpo":
        assert found.keys() == {MASKED, FULL, PLAIN}
        pairs = {ALONE: ["filtered"], EQUAL: ["filtered"] * 2, NAN: ["filtered", "invalid"]}
        assert drops == pairs
    else:
        assert found.keys() == {MASKED, ALONE, EQUAL, NAN, FULL, PLAIN}
        assert drops == {NAN: ["invalid"]}
    assert {n for n, m in found.items() if m["actor/skipped_updates"]} == {MASKED}
    check_whole(feed)
