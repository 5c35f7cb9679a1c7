"""The trainer on a log that a test writes: what it cuts, drops, forks, announces and waits for."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from object_store import ObjectStore
from training_feed import TOPICS, Feed, ended, experience, group, trained_ids
from waiting import until

from streamrft.consumers.checkpoints import CheckpointStore
from streamrft.consumers.settings import LoraSettings, SftSource
from streamrft.deploy.handover import failed_save
from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.streams.log import Partition, Position


@pytest.fixture
def feed(tmp_path: Path, tiny_model_dir: Path):
    made = Feed(tmp_path, tiny_model_dir)
    yield made
    made.close()


def numbers(cuts: list[ev.Cut]) -> list[list[int]]:
    """Publication numbers of each cut, one a member."""
    return [[int(m.trajectory_id.split(":")[0][5:]) for m in c.members] for c in cuts]


def drops(feed: Feed, reason: str) -> list[ev.Drop]:
    return [d for d in feed.read("drops", ev.Drop) if d.reason == reason]


def test_fresh_run_announces_step_0_before_anything(feed: Feed):
    feed.write(ended(0), topic="tasks")
    assert feed.train() == 0
    (first,) = feed.read("checkpoints", ev.Event)
    assert isinstance(first, ev.Checkpoint)
    assert (first.branch, first.step, first.kind) == ("main", 0, "full")
    (found,) = CheckpointStore(str(feed.folder / "checkpoints"), "main").scan()
    assert (found.uri, found.manifest.digest) == (first.uri, first.digest)
    assert found.manifest_sha256 == first.manifest_sha256
    assert found.manifest.num_threads == 1


def test_rest_of_an_epoch_trains_as_a_short_batch(feed: Feed):
    feed.write_groups(range(3))
    feed.write(ended(3), topic="tasks")
    assert feed.train() == 0
    assert numbers(feed.cuts) == [[0, 0, 1, 1], [2, 2]]
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.step, last.kind) == (2, "full")


def test_training_ends_after_total_steps(feed: Feed):
    feed.write_groups(range(8))
    assert feed.train(total_steps=2) == 0
    assert [c.step for c in feed.cuts] == [1, 2]
    assert feed.train(total_steps=2) == 0
    assert [c.step for c in feed.cuts] == [1, 2]


def test_cut_and_step_say_what_was_trained(feed: Feed):
    feed.write_groups(range(2))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    cut, step = feed.read("train_steps", ev.Cut, ev.TrainStep)
    assert isinstance(cut, ev.Cut) and isinstance(step, ev.TrainStep)
    assert cut.parent == str(feed.folder / "checkpoints" / "global_step_0")
    for m in cut.members:
        place = Position(TOPICS.name("experiences"), m.partition, m.offset)
        (record,) = feed.log.read_at([place])
        assert codec.decode(record.value, ev.Experience).trajectory_id == m.trajectory_id
    assert (step.num_experiences, step.num_tokens) == (4, 32)
    assert step.metrics["sample/staleness_max"] == 0
    assert {"reward/mean", "actor/grad_norm", "time/wait_s", "num_groups"} <= set(step.metrics)


def test_stale_experiences_are_dropped_not_trained(feed: Feed):
    feed.write_groups(range(4), version=0)
    feed.write_groups((4, 5), version=1)
    feed.write(ended(6), topic="tasks")
    assert feed.train(max_staleness=0, total_steps=None) == 0
    assert numbers(feed.cuts) == [[0, 0, 1, 1], [4, 4, 5, 5]]
    assert {(d.number, d.step, d.group_experiences) for d in drops(feed, "stale")} == {
        (2, 1, 2),
        (3, 1, 2),
    }
    assert len(drops(feed, "stale")) == 4


def test_lengths_of_what_went_stale_count_as_produced(feed: Feed):
    """Trained are answers of 4 tokens; those of 40 that came with them are too old."""
    feed.write_groups(range(2), version=0)
    feed.write_groups((2, 3), version=-1, num_trained_tokens=40)
    feed.write(ended(4), topic="tasks")
    assert feed.train(max_staleness=0, total_steps=None) == 0
    (step,) = feed.read("train_steps", ev.TrainStep)
    assert step.metrics["response_length/mean"] == 4.0
    assert step.metrics["response_length/produced_mean"] == 22.0
    assert len(drops(feed, "stale")) == 4


def test_restarted_trainer_drops_nothing_twice(feed: Feed):
    feed.write_groups(range(4), version=0)
    feed.write_groups((4, 5), version=1)
    feed.write(ended(6), topic="tasks")
    assert feed.train(max_staleness=0, kill_at="trainer.cut_published@2") == -9
    assert feed.train(max_staleness=0) == 0
    assert len(drops(feed, "stale")) == 4
    assert len(trained_ids(feed.cuts)) == 8


def test_undecodable_experience_becomes_a_dead_letter_and_its_neighbours_train(feed: Feed):
    broken = codec.encode(experience(0, 0))[:-4]
    producer = feed.log.producer()
    producer.send(TOPICS.name("experiences"), broken, key=b"rows.0")
    producer.send(TOPICS.name("experiences"), b"no event", key=b"other")
    producer.flush()
    feed.write(experience(0, 1), *group(1))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    assert trained_ids(feed.cuts) == ["rows.0:1:a", "rows.1:0:a", "rows.1:1:a"]
    letters = feed.read("dead_letters", ev.DeadLetter)
    assert sorted(d.value or b"" for d in letters) == sorted([broken, b"no event"])
    assert {d.topic for d in letters} == {TOPICS.name("experiences")}
    (drop,) = drops(feed, "invalid")
    assert (drop.trajectory_id, drop.group_experiences) == ("rows.0:0:a", 2)


def test_tokens_that_the_model_does_not_know_are_dropped(feed: Feed):
    bad = experience(0, 0)
    trajectory = codec.decode(bad.trajectory, ev.Trajectory)
    (s,) = trajectory.sequences
    s = ev.Sequence(
        **{f: getattr(s, f) for f in s.__struct_fields__}
        | {"tokens": s.tokens[:-4] + b"\xff\xff\x00\x00"}
    )
    fields = {f: getattr(trajectory, f) for f in trajectory.__struct_fields__}
    encoded = codec.encode(ev.Trajectory(**fields | {"sequences": [s]}))
    feed.write(experience(0, 0, trajectory=encoded), experience(0, 1), *group(1))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    assert trained_ids(feed.cuts) == ["rows.0:1:a", "rows.1:0:a", "rows.1:1:a"]
    assert [d.trajectory_id for d in drops(feed, "invalid")] == ["rows.0:0:a"]


def test_large_trajectory_is_fetched_when_its_storage_is_back(feed: Feed):
    whole = codec.decode(experience(0, 0).trajectory, ev.Trajectory)
    store = ObjectStore(feed.folder / "storage")
    claimed = store.put_claim(whole)
    store.stop()
    feed.write(experience(0, 0, trajectory=codec.encode(claimed)), experience(0, 1), *group(1))
    feed.write(ended(2), topic="tasks")
    running = feed.start()
    assert "cannot be read" in wait_for_blocker(feed, store.uri)
    assert feed.cuts == []
    store.start()
    running.join(150)
    store.stop()
    assert running.exitcode == 0
    assert len(trained_ids(feed.cuts)) == 4


def wait_for_blocker(feed: Feed, word: str, timeout_s: float = 60) -> str:
    """What the trainer says it waits for, once that contains `word`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for beat in feed.read("heartbeats", ev.Heartbeat):
            if word in beat.waiting_for:
                return beat.waiting_for
        time.sleep(0.1)
    raise AssertionError(f"no heartbeat waits for {word} in {timeout_s} s")


def test_wait_without_anyone_at_work_ends_with_its_name(feed: Feed):
    feed.write(*group(0))
    assert feed.train(max_read_timeout_ms=700) == 1
    error = feed.said
    assert "step 1 needs 2 groups, has 1 ready" in error
    assert "No scheduler, explorer or join gave a sign of life" in error


def test_wait_goes_on_while_an_explorer_works(feed: Feed):
    running = feed.start(max_read_timeout_ms=4_000, total_steps=1)
    for _ in range(10):
        beat = ev.Heartbeat(
            process="explorer-0", role="explorer", state="alive", host="h", pid=1, produced_at=1
        )
        feed.write(beat, topic="heartbeats")
        time.sleep(0.5)
    assert running.exitcode is None
    feed.write_groups(range(2))
    running.join(150)
    assert running.exitcode == 0


def test_second_trainer_waits_for_the_lease_and_names_its_holder(feed: Feed):
    from streamrft.schemas.errors import Timeout
    from streamrft.streams.log import open_log

    other = open_log(feed.url)
    lease = other.acquire(f"{TOPICS.namespace}.trainer", owner="me", ttl_ms=60_000, timeout_ms=0)
    running = feed.start()
    time.sleep(1)
    assert running.exitcode is None
    assert feed.read("checkpoints", ev.Checkpoint) == []
    with pytest.raises(Timeout, match="me"):
        feed.log.acquire(f"{TOPICS.namespace}.trainer", owner="x", ttl_ms=1, timeout_ms=0)
    other.release(lease)
    feed.write(ended(0), topic="tasks")
    running.join(150)
    assert running.exitcode == 0
    other.close()


# --- forks


def forked(feed: Feed) -> Feed:
    """A run of 4 steps on main, saved in full at 2 and 4."""
    feed.write_groups(range(4), version=0)
    feed.write_groups((4, 5), version=2)
    feed.write_groups((6, 7), version=3)
    assert feed.train(save_interval=2, total_steps=4) == 0
    return feed


def test_fork_trains_again_what_its_lineage_owns(feed: Feed):
    forked(feed)
    feed.write_groups((8, 9), version=2, branch="main.2")
    assert feed.train(resume_from="global_step_2", total_steps=4) == 0
    fork = [c for c in feed.cuts if c.branch == "main.2"]
    assert [c.step for c in fork] == [3, 4]
    assert numbers(fork) == [[4, 4, 5, 5], [8, 8, 9, 9]]
    assert {d.number for d in drops(feed, "off_lineage")} == {6, 7}
    assert (feed.folder / "checkpoints" / "main.2" / "global_step_4" / "manifest.json").exists()
    branches = feed.read("checkpoints", ev.Branch)
    assert [(b.branch, b.parent, b.step) for b in branches] == [("main.2", "main", 2)]
    assert feed.digests[("main.2", 2)] == feed.digests[("main", 2)]


def test_fork_is_continued_not_made_twice(feed: Feed):
    forked(feed)
    feed.write_groups((8, 9), version=2, branch="main.2")
    changes = {"resume_from": "global_step_2", "total_steps": 4}
    assert feed.train(kill_at="trainer.step_done@4", **changes) == -9
    assert feed.train(**changes) == 0
    assert len(feed.read("checkpoints", ev.Branch)) == 1
    assert [c.step for c in feed.cuts if c.branch == "main.2"] == [3, 4]


def test_run_goes_on_with_the_newest_branch(feed: Feed):
    forked(feed)
    assert feed.train(resume_from="global_step_2", branch="again", total_steps=3) == 0
    feed.write_groups((8, 9), version=3, branch="again")
    assert feed.train(total_steps=4) == 0
    assert [c.step for c in feed.cuts if c.branch == "again"] == [3, 4]


@pytest.mark.parametrize(
    ("resume_from", "branch", "message"),
    [
        ("global_step_1", None, "no full checkpoint. Full ones: global_step_0, global_step_2"),
        ("step_2", None, "write global_step_<N>"),
        ("global_step_2", "main", "is the branch that global_step_2 lies on"),
    ],
)
def test_fork_that_cannot_be_is_refused(feed: Feed, resume_from, branch, message):
    feed.write_groups(range(8), version=0)
    assert feed.train(save_interval=2, total_steps=3) == 0
    before = feed.read("checkpoints", ev.Event)
    assert feed.train(resume_from=resume_from, branch=branch, total_steps=4) == 1
    assert message in feed.said
    assert feed.read("checkpoints", ev.Event) == before


# --- the same again


def test_recorded_cuts_of_an_asynchronous_feed_train_the_same_weights(feed: Feed):
    running = feed.start(deterministic=False, total_steps=4)
    for i, number in enumerate((3, 1, 0, 2, 7, 5, 4, 6)):
        feed.write(*group(number, version=i // 4))
        time.sleep(0.05 * (i % 3))
    running.join(150)
    assert running.exitcode == 0
    digests, cuts = feed.digests, feed.cuts
    for step in range(1, 5):
        shutil.rmtree(feed.folder / "checkpoints" / f"global_step_{step}")
    assert feed.train(deterministic=False, total_steps=4) == 0
    assert feed.digests == digests
    assert feed.cuts == cuts
    assert [s.step for s in feed.read("train_steps", ev.TrainStep)] == [1, 2, 3, 4]
    (found,) = (s for s in stored(feed) if s.manifest.step == 4)
    assert found.manifest.digest == digests["main", 4]


def stored(feed: Feed):
    return CheckpointStore(str(feed.folder / "checkpoints"), "main").scan()


def test_version_that_comes_out_otherwise_is_reported_and_the_first_stands(feed: Feed):
    feed.write_groups(range(2))
    assert feed.train(kill_at="checkpoint.published@1") == -9
    feed.write(ended(2), topic="tasks")
    first = feed.digests["main", 1]
    faster = replace(feed.trainer_settings().algorithm.optimizer, lr=2e-3)
    algorithm = replace(feed.trainer_settings().algorithm, optimizer=faster)
    assert feed.train(algorithm=algorithm) == 0
    assert f"policy_version 1 of branch main was announced with digest {first}" in feed.said
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.step, last.kind, last.digest) == (1, "full", first)
    assert {s.manifest.digest for s in stored(feed) if s.manifest.step == 1} == {first}


def test_broken_newest_checkpoint_is_left_aside(feed: Feed):
    feed.write_groups(range(4))
    feed.write(ended(4), topic="tasks")
    assert feed.train() == 0
    digests = feed.digests
    weights = feed.folder / "checkpoints/global_step_2/actor/optim_world_size_1_rank_0.pt"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert feed.train() == 0
    assert feed.digests == digests


def test_lost_folder_or_log_is_refused(feed: Feed, tmp_path: Path, tiny_model_dir: Path):
    feed.write_groups(range(4))
    feed.write(ended(4), topic="tasks")
    assert feed.train() == 0
    (tmp_path / "other").mkdir()
    other = Feed(tmp_path / "other", tiny_model_dir)
    assert other.train(checkpoint_uri=str(feed.folder / "checkpoints")) == 1
    assert "the log knows none of them" in other.said
    shutil.rmtree(feed.folder / "checkpoints")
    assert feed.train() == 1
    assert "2 cuts of branch main" in feed.said
    other.close()


def test_failed_save_is_tried_again_and_training_goes_on(feed: Feed):
    feed.write_groups(range(2))
    running = feed.start()
    until(lambda: ("main", 1) in feed.digests, "version 1")
    checkpoints = feed.folder / "checkpoints"
    checkpoints.rename(feed.folder / "away")
    checkpoints.write_text("no folder")
    feed.write_groups(range(2, 6))
    assert "Not a directory" in wait_for_blocker(feed, "storage of checkpoints")
    until(lambda: len(feed.read("train_steps", ev.TrainStep)) == 3, "step 3")
    until(lambda: len(feed.read("checkpoints", ev.SaveFailed)) == 2, "what failed of it")
    failed = feed.read("checkpoints", ev.SaveFailed)
    assert [(f.step, f.kind) for f in failed] == [(2, "weights"), (3, "weights")]
    assert failed_save(feed.log, TOPICS) == failed[-1]
    checkpoints.unlink()
    (feed.folder / "away").rename(checkpoints)
    until(lambda: ("main", 3) in feed.digests, "version 3")
    assert failed_save(feed.log, TOPICS) is None
    feed.write(ended(6), topic="tasks")
    running.join(150)
    assert running.exitcode == 0
    assert {step for _, step in feed.digests} == {0, 1, 3}


@pytest.mark.parametrize("lora", [None, LoraSettings()], ids=["whole", "adapter"])
def test_first_checkpoint_that_cannot_be_written_fails_the_run(
    feed: Feed, lora: LoraSettings | None
):
    (feed.folder / "checkpoints").write_text("no folder")
    assert feed.train(max_read_timeout_ms=1_000, lora=lora) == 1
    assert [f.step for f in feed.read("checkpoints", ev.SaveFailed)] == [0]
    assert "step 0 is not saved after" in feed.said and "Not a directory" in feed.said


# --- supervised rows


def sft(feed: Feed, **changes) -> dict:
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(5)]
    path = feed.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    algorithm = replace(feed.trainer_settings().algorithm, algorithm_type="sft")
    return {
        "sft": SftSource(path=str(path), total_epochs=2),
        "train_batch_size": 3,
        "algorithm": algorithm,
        **changes,
    }


def test_pairs_of_a_file_train_dpo_and_resume_the_same(
    feed: Feed, tmp_path: Path, tiny_model_dir: Path
):
    """Five pairs twice, three a step; a kill in step 3 changes nothing."""

    def dpo(at: Feed) -> dict:
        path = at.folder / "pairs.jsonl"
        rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(5)]
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return sft(
            at,
            sft=SftSource(path=str(path), total_epochs=2, is_pairs=True),
            algorithm=replace(at.trainer_settings().algorithm, algorithm_type="dpo"),
        )

    assert feed.train(**dpo(feed)) == 0
    steps = feed.read("train_steps", ev.TrainStep)
    assert [(s.step, s.num_experiences) for s in steps] == [(1, 6), (2, 6), (3, 6), (4, 2)]
    assert steps[0].metrics["actor/pg_loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert steps[-1].metrics["actor/reward_accuracy"] > 0.99
    (tmp_path / "pairs").mkdir()
    other = Feed(tmp_path / "pairs", tiny_model_dir)
    assert other.train(kill_at="trainer.step_done@3", **dpo(other)) == -9
    assert other.train(**dpo(other)) == 0
    assert other.digests["main", 4] == feed.digests["main", 4]
    other.close()


def test_supervised_rows_train_each_epoch_once_and_resume_the_same(
    feed: Feed, tmp_path: Path, tiny_model_dir: Path
):
    assert feed.train(**sft(feed)) == 0
    steps = feed.read("train_steps", ev.TrainStep)
    assert [(s.step, s.num_experiences) for s in steps] == [(1, 3), (2, 3), (3, 3), (4, 1)]
    assert feed.cuts == []
    for point in ("trainer.step_done@2", "checkpoint.state_written@2", "checkpoint.published@4"):
        (tmp_path / point).mkdir()
        other = Feed(tmp_path / point, tiny_model_dir)
        assert other.train(kill_at=point, **sft(other, save_interval=2)) == -9
        assert other.train(**sft(other, save_interval=2)) == 0
        assert other.digests["main", 4] == feed.digests["main", 4], point
        other.close()


def test_trainer_commits_its_position_as_a_hint(feed: Feed):
    feed.write_groups(range(2))
    feed.write(ended(2), topic="tasks")
    assert feed.train() == 0
    partitions = [Partition(TOPICS.name("experiences"), p) for p in range(2)]
    consumer = feed.log.consumer(group=f"{TOPICS.namespace}.trainer")
    assert consumer.committed(partitions) == feed.log.end_offsets(partitions)
