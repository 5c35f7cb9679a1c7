"""The explorer over a real log and a tiny model: tasks in, trajectories out, nothing lost."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrft.producers.explorer import AllFailed, run_explorer
from streamrft.producers.rewards import REWARDS
from streamrft.producers.settings import (
    ExplorerSettings,
    RewardSourceSettings,
    RolloutArgs,
    TasksetSettings,
)
from streamrft.producers.workflows import WORKFLOWS, Rollout, SimpleWorkflow
from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError, Timeout
from streamrft.schemas.topics import CATALOGUE, Topics, key_of
from streamrft.streams import blobs
from streamrft.streams.log import Limits, Log, Partition, open_log, topic_specs
from streamrft.streams.process import Process

TOPICS = Topics("p.run")
G = 3


@REWARDS.register("length_reward")
def length_reward(rollout) -> dict[str, float]:
    return {"length": float(rollout.num_tokens)}


@REWARDS.register("nan_reward")
def nan_reward(rollout) -> dict[str, float]:
    return {"length": float("nan")}


@REWARDS.register("picky_reward")
class PickyReward:
    """Raises in its first call."""

    calls = 0

    def __call__(self, rollout) -> dict[str, float]:
        PickyReward.calls += 1
        if PickyReward.calls == 1:
            raise KeyError("the judge is away")
        return {"length": 1.0}


class Faulty(SimpleWorkflow):
    """Fails as often as the row says, in one slot or all of them."""

    tries: dict[str, int] = {}

    async def run(self, group):
        seen = self.tries[group.task.group_id] = self.tries.get(group.task.group_id, 0) + 1
        fault, times = group.row["fault"], group.row.get("times", 99)
        if seen > times:
            return await super().run(group)
        if fault == "raise":
            raise OSError("the environment is away")
        if fault == "hang":
            import asyncio

            await asyncio.sleep(60)
        made = await super().run(group)
        if fault == "slot":
            made[0] = Rollout.failed("slot 0 broke")
        return made[:1] if fault == "short" else made


WORKFLOWS.register("faulty")(Faulty)


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


def taskset(**fields) -> TasksetSettings:
    return TasksetSettings(**{"name": "t", "path": "-", "reward_fn": "length_reward", **fields})


def settings(*tasksets: TasksetSettings, **fields) -> ExplorerSettings:
    return ExplorerSettings(
        **{
            "tasksets": tasksets or (taskset(),),
            "max_prompt_tokens": 64,
            "max_response_tokens": 6,
            "num_threads": 1,
            "weights_timeout_ms": 20_000,
            **fields,
        }
    )


def task(number: int, min_version: int = 0, row: dict | None = None, **fields) -> ev.Task:
    return ev.Task(
        **{
            "group_id": f"t.{number}",
            "number": number,
            "taskset": "t",
            "row": number,
            "epoch": 0,
            "branch": "main",
            "step": 1,
            "min_policy_version": min_version,
            "group_size": G,
            "workflow": "simple_workflow",
            "reward_fn": "length_reward",
            "content": json.dumps(row or {"prompt": f"{number}+1"}),
            "produced_at": ev.now_ms(),
            **fields,
        }
    )


def say(log: Log, topic: str, *events: ev.Event) -> None:
    producer = log.producer()
    for event in events:
        producer.send(TOPICS.name(topic), codec.encode(event), key=key_of(event, topic))
    producer.flush()


def read(log: Log, topic: str) -> list:
    name = TOPICS.name(topic)
    consumer = log.consumer()
    consumer.assign({Partition(name, p): 0 for p in range(TOPICS.partitions(topic))})
    return [codec.decode(r.value or b"", *CATALOGUE[topic].carries) for r in consumer.poll(100_000)]


def trajectories(log: Log) -> list[ev.Trajectory]:
    return sorted(read(log, "trajectories"), key=lambda t: (t.number, t.slot))


def uncommitted(log: Log) -> int:
    """Records of tasks that the explorers' group has not committed."""
    name = TOPICS.name("tasks")
    partitions = [Partition(name, p) for p in range(TOPICS.partitions("tasks"))]
    done = log.consumer(group="p.run.explorers").committed(partitions)
    return sum(end - done.get(p, 0) for p, end in log.end_offsets(partitions).items())


def checkpoint(model: Path, folder: Path, step: int, branch: str = "main") -> ev.Checkpoint:
    """Weights that differ by step and branch, as a trainer saves them."""
    hf = folder / branch / f"global_step_{step}" / "actor" / "huggingface"
    hf.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (hf / file.name).write_bytes(file.read_bytes())
    state = load_file(model / "model.safetensors")
    shift = 0.02 * step + (0.5 if branch != "main" else 0.0)
    state = {
        k: v + shift * torch.sin(torch.arange(v.numel()).reshape(v.shape)) for k, v in state.items()
    }
    save_file(state, hf / "model.safetensors", metadata={"format": "pt"})
    digest = hashlib.sha256((hf / "model.safetensors").read_bytes()).hexdigest()
    return ev.Checkpoint(
        branch=branch,
        step=step,
        kind="full",
        uri=str(folder / branch / f"global_step_{step}"),
        digest=digest,
        manifest_sha256="m",
        epoch=1,
        produced_at=ev.now_ms(),
    )


@contextmanager
def running(url: str, chosen: ExplorerSettings, name: str = "explorer-0", limits=None):
    """An explorer in a thread with its own log; yields the errors that it ended with."""
    box: list[Process] = []
    errors: list[BaseException] = []

    def body() -> None:
        own = open_log(url, limits)
        box.append(Process(own, TOPICS, name=name, role="explorer"))
        try:
            run_explorer(box[0], chosen)
        except Exception as error:
            errors.append(error)
        own.close()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield errors
    finally:
        until(lambda: bool(box))
        box[0].stop()
        thread.join(10)
        assert not thread.is_alive(), "did not stop"


def until(ready: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_tasks_become_trajectories_and_are_committed(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i) for i in range(10)))
    producer = log.producer()
    ended = ev.Ended(branch="main", num_groups=10, produced_at=0)
    producer.send(TOPICS.name("tasks"), codec.encode(ended), key=b"ended", partition=0)
    producer.send(TOPICS.name("tasks"), b"poison", key=b"x")
    producer.flush()
    with running(url, settings()):
        until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert [(t.number, t.slot) for t in made] == [(n, s) for n in range(10) for s in range(G)]
    assert len({t.attempt for t in made}) == 10
    first = made[0]
    assert first.reward_sources == {"length": 1.0} and first.producer == "explorer-0"
    assert first.scores == [ev.Score(source="length", value=first.metrics["response_length"])]
    (letter,) = read(log, "dead_letters")
    assert (letter.value, letter.reader) == (b"poison", "explorer-0")


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
        time.sleep(0.3)
        assert {t.number for t in trajectories(log)} == {0}
        beats = read(log, "heartbeats")
        until(lambda: read(log, "heartbeats")[len(beats) :])
        waits = read(log, "heartbeats")[-1].waiting_for
        assert "policy_version 2 on branch main for t.1; policy_version 0 is the newest" in waits
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


def test_broken_weights_leave_the_old_version_serving(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    with running(url, settings()):
        say(log, "tasks", task(0))
        until(lambda: uncommitted(log) == 0)
        broken = checkpoint(tiny_model_dir, tmp_path / "c", 1)
        (Path(broken.uri) / "actor" / "huggingface" / "model.safetensors").write_bytes(b"x")
        say(log, "checkpoints", broken)
        say(log, "tasks", task(1))
        until(lambda: uncommitted(log) == 0)
        say(log, "tasks", task(2, min_version=1))
        time.sleep(0.5)
        assert uncommitted(log) == 1
        say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 2))
        until(lambda: uncommitted(log) == 0)
    assert {t.number: t.max_policy_version for t in trajectories(log)} == {0: 0, 1: 0, 2: 2}


@pytest.mark.parametrize(
    ("row", "failed", "tries"),
    [
        ({"fault": "raise"}, [0, 1, 2], 3),
        ({"fault": "raise", "times": 2}, [], 3),
        ({"fault": "hang"}, [0, 1, 2], 3),
        ({"fault": "slot"}, [0], 3),
        ({"fault": "slot", "times": 1}, [], 2),
        ({"fault": "short"}, [0, 1, 2], 1),
    ],
)
def test_faults_are_retried_then_become_failed_trajectories(
    url, log, tmp_path, tiny_model_dir, row, failed, tries
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, row={"prompt": "1+1"} | row, workflow="faulty"))
    Faulty.tries.clear()
    with running(url, settings(max_retry_times=2, max_timeout_ms=300)):
        until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert [t.slot for t in made if t.is_failed] == failed and len(made) == G
    assert Faulty.tries["t.0"] == tries
    reasons = {
        "raise": "OSError: the env",
        "hang": "took over 0.3 s",
        "slot": "slot 0 broke",
        "short": "1 rollouts of 3",
    }
    assert all(reasons[row["fault"]] in t.failure for t in made if t.is_failed)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"taskset": "other"}, "taskset 'other' is not in this explorer's configuration"),
        ({"content": "no json"}, "content is no JSON"),
        ({"content": '{"text": "x"}'}, "no prompt under 'prompt'"),
        ({"workflow": "mystery"}, "workflow 'mystery' is unknown"),
        ({"reward_fn": "nan_reward"}, "'length' is nan, not a finite number"),
        ({"reward_fn": "accuracy_reward"}, "no known answer"),
    ],
)
def test_task_that_cannot_be_done_fails_with_its_reason(
    url, log, tmp_path, tiny_model_dir, fields, says
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, **fields), task(1))
    with running(url, settings(max_retry_times=0)):
        until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert [t.is_failed for t in made] == [True] * G + [False] * G
    assert all(says in t.failure for t in made[:G])


@pytest.mark.parametrize("retries", [0, 1])
def test_reward_that_raises_costs_its_own_slot_a_try(url, log, tmp_path, tiny_model_dir, retries):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, reward_fn="picky_reward"))
    PickyReward.calls = 0
    with running(url, settings(max_retry_times=retries)):
        until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert [t.is_failed for t in made] == [retries == 0, False, False]
    assert PickyReward.calls == G + retries
    assert retries or "raised KeyError: 'the judge is away'" in made[0].failure


def test_explorer_ends_when_nothing_succeeds_any_more(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i, reward_fn="accuracy_reward") for i in range(80)))
    with running(url, settings(max_retry_times=0)) as errors:
        until(lambda: bool(errors))
    assert isinstance(errors[0], AllFailed)
    assert "last 64 groups failed; the last: the row has no known answer" in str(errors[0])
    assert len(trajectories(log)) < 80 * G


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
    chosen = settings(max_prompt_tokens=400, max_event_bytes=1_200, storage_uri=storage)
    with running(url, chosen):
        until(lambda: uncommitted(log) == 0)
    for t in trajectories(log):
        if has_storage:
            assert t.claim is not None and t.sequences == []
            assert blobs.resolve(t).sequences[0].num_tokens > 300
        else:
            assert "storage.uri" in t.failure


def test_two_explorers_share_the_tasks(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    with running(url, settings(runner_per_model=2)):
        with running(url, settings(runner_per_model=2), "explorer-1"):
            say(log, "tasks", *(task(i) for i in range(300, 304)))
            until(lambda: uncommitted(log) == 0)
            time.sleep(0.5)
            say(log, "tasks", *(task(i) for i in range(60)))
            until(lambda: uncommitted(log) == 0)
    made = trajectories(log)
    assert {t.producer for t in made} == {"explorer-0", "explorer-1"}
    assert {(t.number, t.slot) for t in made} >= {(n, s) for n in range(60) for s in range(G)}


def test_stop_in_the_middle_leaves_tasks_uncommitted_for_the_next(
    url, log, tmp_path, tiny_model_dir
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i) for i in range(30)))
    slow = settings(max_response_tokens=400, runner_per_model=4)
    with running(url, slow):
        until(lambda: trajectories(log))
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 4
    assert uncommitted(log) > 0
    with running(url, settings(runner_per_model=32), "explorer-1"):
        until(lambda: uncommitted(log) == 0)
    assert {(t.number, t.slot) for t in trajectories(log)} == {
        (n, s) for n in range(30) for s in range(G)
    }


def test_weights_that_never_come_are_named(url, log, tmp_path, tiny_model_dir):
    say(log, "tasks", task(0))
    with running(url, settings(weights_timeout_ms=300)) as errors:
        until(lambda: bool(errors))
    assert isinstance(errors[0], Timeout) and "there is none yet" in str(errors[0])
    assert uncommitted(log) == 1


def test_deterministic_run_is_aborted_by_a_time_out(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, row={"prompt": "1", "fault": "hang"}, workflow="faulty"))
    with running(url, settings(deterministic=True, max_timeout_ms=300)) as errors:
        until(lambda: bool(errors))
    assert isinstance(errors[0], Timeout) and "lets no clock decide" in str(errors[0])
    assert trajectories(log) == [] and uncommitted(log) == 1


def test_unknown_workflow_in_the_configuration_ends_the_process_at_once(url):
    with running(url, settings(taskset(workflow="mystery"))) as errors:
        until(lambda: bool(errors))
    assert isinstance(errors[0], ConfigError)


def test_limits_of_the_log_are_those_of_the_events():
    assert Limits().max_event_bytes == settings().max_event_bytes
