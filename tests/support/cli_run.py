"""One run's configuration and log for tests of the commands, with events written by hand."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from topic_events import append_events
from waiting import until

from streamrft.deploy.cli import main
from streamrft.deploy.plan import plan
from streamrft.deploy.views.place import Place, opened
from streamrft.schemas import events as ev
from streamrft.schemas.arrays import pack_floats, pack_ints, pack_mask, pack_runs
from streamrft.streams.log import Partition
from streamrft.streams.process import Process
from streamrft.streams.reading import committed
from streamrft.streams.settings import StreamSettings
from streamrft.streams.worker import run_join

CONFIG = {
    "project": "p",
    "name": "n",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
    "model": {"model_path": "m", "max_model_len": 64},
    "buffer": {
        "total_steps": 1,
        "explorer_input": {"taskset": {"name": "rows", "path": "rows.jsonl"}},
    },
    "explorer": {"rollout_model": {"engine_type": "transformers"}},
    "rewards": {"human": {"deadline": "3d", "max_staleness": None}},
}


@dataclass
class Cli:
    """One run's files; `run` is a command on it in this process."""

    config: Path
    capsys: pytest.CaptureFixture[str]

    def change(self, **sections: Any) -> None:
        """Lay sections over the configuration file."""
        self.config.write_text(json.dumps(json.loads(self.config.read_text()) | sections))

    def run(self, *words: str) -> tuple[int, str, str]:
        code = main([*words, "--config", str(self.config)])
        out, err = self.capsys.readouterr()
        return code, out, err

    def lines(self, *words: str) -> list[dict[str, Any]]:
        code, out, err = self.run(*words)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def place(self) -> Any:
        return opened(str(self.config), None)


def new_cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A configuration whose run never started."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(CONFIG | {"checkpoint_root_dir": str(folder / "runs")}))
    return Cli(path, capsys)


def cli_with_topics(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A run with a log and empty topics."""
    cli = new_cli(folder, capsys)
    run = plan(cli.config)
    log = run.open_log()
    log.ensure_topics(run.topic_specs(run.stage(None)))
    log.close()
    return cli


def trajectory(group: int, slot: int, **changes: Any) -> ev.Trajectory:
    group_id = f"rows.{group}"
    sequence = ev.Sequence(
        tokens=pack_ints([1, 2, 3]), loss_mask=pack_mask([0, 1, 1]),
        logprobs=pack_floats([0, -1, -1]), policy_versions=pack_runs([0, 0]),
    )  # fmt: skip
    fields: dict[str, Any] = dict(
        trajectory_id=f"{group_id}:{slot}:a", group_id=group_id, slot=slot, attempt="a",
        number=group, taskset="rows", producer="explorer-0", branch="main", min_policy_version=0,
        max_policy_version=0, group_size=2, sequences=[sequence], finish_reason="stop",
        scores=[ev.Score(source="rule", value=float(slot))], reward_sources={"rule": 1.0},
        produced_at=ev.now_ms(),
    )  # fmt: skip
    return ev.Trajectory(**(fields | changes))


def failed(group: int, slot: int) -> ev.Trajectory:
    return trajectory(
        group, slot, finish_reason="failed", failure="it broke", sequences=[], scores=[],
        reward_sources={},
    )  # fmt: skip


def append(place: Place, topic: str, *events: ev.Event) -> None:
    append_events(place.log, place.stage.topics, topic, *events)


def join_everything(cli: Cli) -> None:
    """Run a join worker until it has read the ends of its topics."""
    box: list[Process] = []

    def work() -> None:
        with cli.place() as place:
            process = Process(place.log, place.stage.topics, name="join-0", role="join")
            box.append(process)
            run_join(process, StreamSettings())

    worker = threading.Thread(target=work)
    worker.start()
    try:
        until(lambda: box and _is_joined(cli), "the join has read everything")
    finally:
        box[0].stop()
        worker.join(60)


def _is_joined(cli: Cli) -> bool:
    with cli.place() as place:
        names = [place.stage.topics.name(t) for t in ("trajectories", "rewards")]
        places = [Partition(n, p) for n in names for p in range(4)]
        done = committed(place.log, "p.n.join", places)
        return all(done.get(p, 0) >= end for p, end in place.log.end_offsets(places).items())


def small_run(cli: Cli) -> Cli:
    """Group 0 trained, group 1 ready, 2 half failed and waiting for a human, 3 not joined."""
    wait = {"rule": 1.0, "human": 1.0}
    with cli.place() as place:
        append(place, "trajectories", *(trajectory(g, s) for g in (0, 1) for s in (0, 1)))
        late = trajectory(2, 0, reward_sources=wait, reward_deadline_ms=86_400_000)
        append(place, "trajectories", late, failed(2, 1))
    join_everything(cli)
    with cli.place() as place:
        append(place, "train_steps", cut(place, 1, "rows.0:0:a", "rows.0:1:a"))
        step = ev.TrainStep(
            branch="main", step=1, num_experiences=2, num_tokens=6,
            metrics={"reward/mean": 0.5}, epoch=1, produced_at=ev.now_ms(),
        )  # fmt: skip
        append(place, "train_steps", step)
        saved = ev.Checkpoint(
            branch="main", step=1, kind="full", uri="/c/global_step_1", digest="d" * 64,
            manifest_sha256="e" * 64, epoch=1, produced_at=ev.now_ms(),
        )  # fmt: skip
        append(place, "checkpoints", saved)
        append(place, "trajectories", trajectory(3, 0))
    return cli


def cut(place: Place, step: int, *names: str) -> ev.Cut:
    members = [
        ev.CutMember(trajectory_id=n, reward_revision=0, partition=0, offset=0) for n in names
    ]
    return ev.Cut(
        branch="main", step=step, members=members, parent="", epoch=1, produced_at=ev.now_ms()
    )
