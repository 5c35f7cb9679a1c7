"""The explorer over a real log and a tiny model: tasks in, trajectories out, nothing lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from explorer_run import (
    TOPICS,
    G,
    checkpoint,
    read,
    running,
    say,
    settings,
    task,
    taskset,
    trajectories,
    uncommitted,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import until

from streamrft.producers.explorer import Explorer
from streamrft.producers.settings import RewardSourceSettings, RolloutArgs
from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.streams import blobs
from streamrft.streams.log import Log, open_log, topic_specs


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/log.db"
    log = open_log(url)
    log.ensure_topics(topic_specs(TOPICS))
    log.close()
    return url


@pytest.fixture
def log(url) -> Iterator[Log]:
    log = open_log(url)
    yield log
    log.close()


def test_tasks_become_trajectories_and_are_committed(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i) for i in range(10)))
    producer = log.producer()
    ended = ev.Ended(branch="main", num_groups=10, produced_at=0)
    producer.send(TOPICS.name("tasks"), codec.encode(ended), key=b"ended", partition=0)
    poison = [
        b"poison",
        b"",
        None,
        codec.encode(task(99))[:-3],
        b'{"group_id": "g"}',
        b"\xc3\x01" * 9,
    ]
    for value in poison:
        producer.send(TOPICS.name("tasks"), value, key=b"x")
    producer.flush()
    with running(url, settings()):
        until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert [(t.number, t.slot) for t in made] == [(n, s) for n in range(10) for s in range(G)]
    assert len({t.attempt for t in made}) == 10
    first = made[0]
    assert first.reward_sources == {"length": 1.0} and first.producer == "explorer-0"
    assert first.scores == [ev.Score(source="length", value=first.metrics["response_length"])]
    letters = read(log, "dead_letters")
    assert [letter.value for letter in letters] == poison
    assert {letter.reader for letter in letters} == {"explorer-0"}


def test_tokens_are_the_templates_prompt_and_what_was_sampled(url, log, tmp_path, tiny_model_dir):
    announced = checkpoint(tiny_model_dir, tmp_path / "c", 0)
    say(log, "checkpoints", announced)
    say(log, "tasks", task(0))
    chosen = settings(taskset(system_prompt="sum", rollout_args=RolloutArgs(temperature=0.7)))
    with running(url, chosen):
        until(lambda: uncommitted(log) == 0)
    folder = Path(announced.uri) / "actor" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "system", "content": "sum"}, {"role": "user", "content": "0+1"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for t in trajectories(log):
        (sequence,) = t.sequences
        tokens, mask = arrays.ints(sequence.tokens), arrays.mask(sequence.loss_mask)
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1] / 0.7
        full = logits.log_softmax(-1)[
            torch.arange(len(tokens) - 1), torch.tensor(tokens[1:]).long()
        ]
        gap = (arrays.floats(sequence.logprobs)[1:] - full.numpy()) * mask[1:]
        assert np.abs(gap).max() < 1e-4 and sequence.temperature == 0.7
        assert [turn.role for turn in sequence.turns] == ["system", "user", "assistant"]
        assert tokenizer.decode(tokens[slice(sequence.turns[1].start, sequence.turns[1].end)]) == (
            "<|user|>0+1<|end|><|assistant|>"
        )


def test_same_seed_gives_the_same_tokens_whoever_runs(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    twice = [[task(i, group_id=f"t.{i}") for i in range(4)]] * 2
    for part, deterministic in zip(twice, (True, False), strict=True):
        say(log, "tasks", *part)
        with running(url, settings(deterministic=deterministic, seed=9)):
            until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    by_place: dict[tuple[int, int], list[ev.Trajectory]] = {}
    for t in made:
        by_place.setdefault((t.number, t.slot), []).append(t)
    assert all(len(pair) == 2 for pair in by_place.values()) and len(by_place) == 4 * G
    for one, other in by_place.values():
        assert one.sequences[0].tokens == other.sequences[0].tokens
        assert one.attempt != other.attempt
    assert len({t.sequences[0].tokens for t in made}) > G


def test_task_waits_for_its_version_and_newer_weights_are_taken(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0), task(1, min_version=2))
    with running(url, settings()):
        until(lambda: len(trajectories(log)) == G)
        waits = "policy_version 2 on branch main for t.1; policy_version 0 is the newest"
        until(lambda: any(waits in b.waiting_for for b in read(log, "heartbeats")), "the wait")
        assert {t.number for t in trajectories(log)} == {0}
        say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 2))
        until(lambda: uncommitted(log) == 0)
    versions = {t.number: (t.min_policy_version, t.max_policy_version) for t in trajectories(log)}
    assert versions == {0: (0, 0), 1: (2, 2)}


def test_fork_lowers_the_version_and_frees_tasks_of_the_old_branch(
    url, log, tmp_path, tiny_model_dir
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 1))
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 3))
    say(log, "tasks", task(0, min_version=3))
    with running(url, settings()):
        until(lambda: uncommitted(log) == 0)
        say(log, "tasks", task(1, min_version=4))
        time.sleep(0.3)
        say(log, "checkpoints", ev.Branch(branch="b", parent="main", step=1, produced_at=0))
        until(lambda: uncommitted(log) == 0)
        say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 2, "b"))
        say(log, "tasks", task(2, min_version=2, branch="b"))
        until(lambda: uncommitted(log) == 0)
    found = {t.number: (t.branch, t.max_policy_version) for t in trajectories(log)}
    assert found == {0: ("main", 3), 1: ("main", 1), 2: ("b", 2)}


def test_task_of_a_fork_read_before_the_fork_is_rolled_out_by_its_weights(
    url, log, tmp_path, tiny_model_dir, monkeypatch
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 4))
    forked = checkpoint(tiny_model_dir, tmp_path / "c", 3, "b")
    take, taken = Explorer._take, threading.Event()

    def fork_then_take(explorer: Explorer) -> None:
        if not taken.is_set():
            with closing(open_log(url)) as own:
                fork = ev.Branch(branch="b", parent="main", step=2, produced_at=0)
                say(own, "checkpoints", fork, forked)
                say(own, "tasks", task(0, min_version=3, branch="b"))
            taken.set()
        take(explorer)

    monkeypatch.setattr(Explorer, "_take", fork_then_take)
    with running(url, settings()):
        until(lambda: taken.is_set() and uncommitted(log) == 0)
    assert {(t.branch, t.min_policy_version) for t in trajectories(log)} == {("b", 3)}


def test_outside_sources_are_expected_with_their_weights(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, reward_fn=""), task(1))
    chosen = settings(
        reward_sources={
            "people": RewardSourceSettings(2.0, 5_000),
            "judge": RewardSourceSettings(1.0, 9_000),
            "length": RewardSourceSettings(0.5),
        },
        part_weights={"length": 0.5, "people": 2.0},
    )
    with running(url, chosen):
        until(lambda: uncommitted(log) == 0)
    by_number = {t.number: t for t in trajectories(log)}
    everything = {"people": 2.0, "judge": 1.0, "length": 0.5}
    assert by_number[0].reward_sources == by_number[1].reward_sources == everything
    assert by_number[0].scores == [] and by_number[0].reward_deadline_ms is None
    assert by_number[1].reward_deadline_ms == 9_000


def test_rollout_that_nothing_scores_fails(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, reward_fn=""))
    with running(url, settings()):
        until(lambda: uncommitted(log) == 0)
    assert all("nothing scores it" in t.failure for t in trajectories(log))


@pytest.mark.parametrize("has_storage", [True, False])
def test_large_trajectory_goes_beside_the_log(url, log, tmp_path, tiny_model_dir, has_storage):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, row={"prompt": "x" * 300}))
    storage = str(tmp_path / "blobs") if has_storage else None
    chosen = settings(max_prompt_tokens=400, max_event_bytes=2_400, storage_uri=storage)
    with running(url, chosen):
        until(lambda: uncommitted(log) == 0)
    for t in trajectories(log):
        if has_storage:
            assert t.claim is not None and t.sequences == []
            assert blobs.resolve(t).sequences[0].num_tokens > 300
        else:
            assert "storage.uri" in t.failure
