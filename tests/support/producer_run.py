"""Scheduler and explorer as processes that may die, with the test in the place of the trainer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import FORKED
from topic_events import append_events, events_on, num_uncommitted

from streamrft.producers.settings import (
    ExplorerSettings,
    Pacing,
    SchedulerSettings,
    TasksetSettings,
)
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics
from streamrft.streams.log import Log, open_log, topic_specs

TOPICS = Topics("tests.producers")
BATCH, GROUP = 2, 2


def _role(url: str, role: str, settings: Any, kill_at: str) -> None:
    from streamrft.producers.explorer import run_explorer
    from streamrft.producers.rewards import REWARDS
    from streamrft.producers.scheduler import run_scheduler
    from streamrft.streams.process import Process

    os.environ["STREAMRFT_KILL_AT"] = kill_at
    REWARDS.register("length_reward")(lambda rollout: {"length": float(rollout.num_tokens)})
    log = open_log(url)
    process = Process(log, TOPICS, name=f"{role}-{os.getpid()}", role=role)
    process.stop_on_signals()
    (run_scheduler if role == "scheduler" else run_explorer)(process, settings)
    log.close()


@dataclass
class ProducerRun:
    """One log with a taskset of `num_rows` rows and the tiny model's weights of every version."""

    folder: Path
    model: Path
    num_rows: int = 12

    def __post_init__(self) -> None:
        self.url = f"sqlite:///{self.folder}/log.db"
        self.log: Log = open_log(self.url)
        self.log.ensure_topics(topic_specs(TOPICS))
        rows = [json.dumps({"prompt": f"{i}+{i}"}) for i in range(self.num_rows)]
        (self.folder / "rows.jsonl").write_text("\n".join(rows))
        taskset = TasksetSettings(
            name="t", path=str(self.folder / "rows.jsonl"), reward_fn="length_reward"
        )
        self.schedule = SchedulerSettings(
            (taskset,), BATCH, GROUP, Pacing(sync_offset=1), lease_ms=2_000
        )
        self.explore = ExplorerSettings((taskset,), max_response_tokens=6, num_threads=1, seed=5)

    def start(self, role: str, kill_at: str = "") -> Any:
        """A process of the role, killed at a point of `faults` if one is named."""
        settings = self.schedule if role == "scheduler" else self.explore
        if kill_at:
            kill_at = f"{kill_at}={self.folder}/{kill_at}.marker"
        process = FORKED.Process(target=_role, args=(self.url, role, settings, kill_at))
        process.start()
        return process

    def say(self, topic: str, *events: ev.Event) -> None:
        """Append events, acknowledged."""
        append_events(self.log, TOPICS, topic, *events)

    def read(self, topic: str) -> list[Any]:
        """Every event of a topic."""
        return events_on(self.log, TOPICS, topic, ev.Event)

    def tasks(self) -> list[ev.Task]:
        """Every task by its place on the log's order of numbers."""
        tasks = [t for t in self.read("tasks") if isinstance(t, ev.Task)]
        return sorted(tasks, key=lambda t: t.number)

    def train(self, step: int) -> None:
        """Cut the groups of a step and announce its weights, as a trainer would."""
        groups = [t.group_id for t in self.tasks() if t.step == step]
        members = [
            ev.CutMember(trajectory_id=f"{g}:0:a", reward_revision=0, partition=0, offset=i)
            for i, g in enumerate(groups)
        ]
        now = ev.now_ms()
        cut = ev.Cut(branch="main", step=step, members=members, parent="", epoch=1, produced_at=now)
        self.say("train_steps", cut)
        self.announce(step)

    def announce(self, step: int) -> None:
        """Weights of a version; the same bytes every time."""
        place = self.folder / f"global_step_{step}"
        shutil.copytree(self.model, place / "actor" / "huggingface")
        weights = place / "actor" / "huggingface" / "model.safetensors"
        checkpoint = ev.Checkpoint(
            branch="main",
            step=step,
            kind="full",
            uri=str(place),
            digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
            manifest_sha256="m",
            epoch=1,
            produced_at=ev.now_ms(),
        )
        self.say("checkpoints", checkpoint)

    def num_uncommitted(self) -> int:
        """Records of tasks that the explorers have not committed."""
        return num_uncommitted(self.log, TOPICS)
