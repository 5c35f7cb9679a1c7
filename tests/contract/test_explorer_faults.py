"""An explorer whose weights, environments, rewards or neighbours fail."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_run import (
    TOPICS,
    Faulty,
    G,
    PickyReward,
    checkpoint,
    running,
    say,
    settings,
    task,
    taskset,
    trajectories,
    uncommitted,
)
from transformers import AutoConfig, AutoModelForCausalLM
from waiting import until

from streamrft.producers.engines.engine import WeightsMismatch
from streamrft.producers.explorer import AllFailed
from streamrft.schemas.errors import ConfigError, LogUnavailable, Timeout
from streamrft.streams.log import Log, open_log, topic_specs
from streamrft.streams.sqlite.consumer import SqliteConsumer


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


def test_weights_of_another_model_end_the_explorer_whatever_workflows_make_of_them(
    url, log, tmp_path, tiny_model_dir
):
    other = Path(shutil.copytree(tiny_model_dir, tmp_path / "other"))
    config = AutoConfig.from_pretrained(tiny_model_dir, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0))
    with running(url, settings(max_retry_times=0)) as errors:
        until(lambda: uncommitted(log) == 0)
        wrong = checkpoint(other, tmp_path / "c", 1)
        say(log, "checkpoints", wrong)
        row = {"prompt": "1+1", "fault": "swallow"}
        say(log, "tasks", *(task(i, 1, row, workflow="faulty") for i in (1, 2)))
        until(lambda: bool(errors))
    assert isinstance(errors[0], WeightsMismatch)
    assert f"policy_version 1 on branch main at {wrong.uri}: " in str(errors[0])
    assert "Start the explorers again" in str(errors[0])
    assert {t.number for t in trajectories(log)} == {0} and uncommitted(log) == 2
    with running(url, settings(), "explorer-1"):
        until(lambda: uncommitted(log) == 0)
    assert [t.number for t in trajectories(log) if not t.is_failed] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


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
    limit_ms = 300 if row["fault"] == "hang" else 60_000
    with running(url, settings(max_retry_times=2, max_timeout_ms=limit_ms)):
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


def test_log_that_does_not_answer_is_waited_for(url, log, tmp_path, tiny_model_dir, monkeypatch):
    away, polled = [], SqliteConsumer.poll

    def poll(consumer, *words):
        if len(away) < 4 and consumer.positions():
            away.append(consumer)
            raise LogUnavailable("no broker answers")
        return polled(consumer, *words)

    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    with running(url, settings()) as errors:
        say(log, "tasks", task(0))
        until(lambda: uncommitted(log) == 0)
        monkeypatch.setattr(SqliteConsumer, "poll", poll)
        until(lambda: len(away) == 4 or errors)
        say(log, "tasks", task(1))
        until(lambda: uncommitted(log) == 0 or errors)
        assert not errors
    assert len(set(away)) == 1, "repeated where it failed"


def test_explorer_ends_when_nothing_succeeds_any_more(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i, reward_fn="accuracy_reward") for i in range(80)))
    with running(url, settings(max_retry_times=0)) as errors:
        until(lambda: bool(errors))
    assert isinstance(errors[0], AllFailed)
    assert "last 64 groups failed; the last: the row has no known answer" in str(errors[0])
    assert len(trajectories(log)) < 80 * G


def test_two_explorers_share_the_tasks(url, log, tmp_path, tiny_model_dir):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    wave = 0
    with running(url, settings()), running(url, settings(), "explorer-1"):
        deadline = time.monotonic() + 60
        while {t.producer for t in trajectories(log)} != {"explorer-0", "explorer-1"}:
            assert time.monotonic() < deadline, f"one explorer had all the tasks of {wave} waves"
            say(log, "tasks", *(task(i) for i in range(8 * wave, 8 * wave + 8)))
            wave += 1
            until(lambda: uncommitted(log) == 0)
    assert {(t.number, t.slot) for t in trajectories(log)} == {
        (n, s) for n in range(8 * wave) for s in range(G)
    }


def test_stop_in_the_middle_leaves_tasks_uncommitted_for_the_next(
    url, log, tmp_path, tiny_model_dir
):
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", *(task(i) for i in range(30)))
    slow = settings(max_response_tokens=400, runner_per_model=4)
    with running(url, slow):
        until(lambda: trajectories(log))
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 30
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


def test_storage_that_stays_away_has_a_deadline_and_a_name(url, log, tmp_path, tiny_model_dir):
    (tmp_path / "file").write_bytes(b"no folder")
    away = settings(
        max_prompt_tokens=400,
        max_event_bytes=2_400,
        storage_uri=str(tmp_path / "file"),
        weights_timeout_ms=500,
    )
    say(log, "checkpoints", checkpoint(tiny_model_dir, tmp_path / "c", 0))
    say(log, "tasks", task(0, row={"prompt": "7" * 200}))
    with running(url, away) as errors:
        until(lambda: errors)
    (error,) = errors
    assert isinstance(error, Timeout) and "file" in error.blocker
    assert uncommitted(log) == 1
