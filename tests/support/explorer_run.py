"""An explorer in a thread over a real log, with the test in the place of everything else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from topic_events import append_events, events_on, num_uncommitted
from waiting import until

from streamrft.producers.explorer import run_explorer
from streamrft.producers.rewards import REWARDS
from streamrft.producers.settings import ExplorerSettings, TasksetSettings
from streamrft.producers.workflows import WORKFLOWS, Rollout, SimpleWorkflow
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics
from streamrft.streams.log import Log, open_log
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
            await asyncio.sleep(60)
        if fault == "swallow":
            try:
                return await super().run(group)
            except Exception as error:
                return [Rollout.failed(str(error))] * len(group.slots)
        made = await super().run(group)
        if fault == "slot":
            made[0] = Rollout.failed("slot 0 broke")
        return made[:1] if fault == "short" else made


WORKFLOWS.register("faulty")(Faulty)


def taskset(**fields) -> TasksetSettings:
    return TasksetSettings(**{"name": "t", "path": "-", "reward_fn": "length_reward", **fields})


def settings(*tasksets: TasksetSettings, **fields) -> ExplorerSettings:
    return ExplorerSettings(
        **{
            "tasksets": tasksets or (taskset(),),
            "max_prompt_tokens": 64,
            "max_response_tokens": 6,
            "num_threads": 1,
            "weights_timeout_ms": 60_000,
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
    append_events(log, TOPICS, topic, *events)


def read(log: Log, topic: str) -> list[Any]:
    return events_on(log, TOPICS, topic, ev.Event)


def trajectories(log: Log) -> list[ev.Trajectory]:
    return sorted(read(log, "trajectories"), key=lambda t: (t.number, t.slot))


def uncommitted(log: Log) -> int:
    """Records of tasks that the explorers' group has not committed."""
    return num_uncommitted(log, TOPICS)


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
def running(
    url: str, chosen: ExplorerSettings, name: str = "explorer-0"
) -> Iterator[list[BaseException]]:
    """An explorer in a thread with its own log; yields the errors that it ended with."""
    box: list[Process] = []
    errors: list[BaseException] = []

    def body() -> None:
        own = open_log(url)
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
        thread.join(60)
        assert not thread.is_alive(), "did not stop"
