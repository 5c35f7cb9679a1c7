"""A whole run that is small enough to be killed many times: a tiny model, four groups a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import UnknownTopic
from streamrft.schemas.topics import CATALOGUE, Topics
from streamrft.streams.log import Record, open_log
from streamrft.streams.reading import begins, read_to_end

E = TypeVar("E", bound=ev.Event)

PLUGIN = '''"""A reward that a random model earns about half of the time, whatever it learned."""

import os
import time

from streamrft.producers.rewards import REWARDS


@REWARDS.register("parity_reward")
class ParityReward:
    """1 for an answer with an even sum of character codes; takes its time where a test asks."""

    def __call__(self, rollout):
        time.sleep(float(os.environ.get("PARITY_S", "0")))
        return {"parity": float(sum(map(ord, rollout.response)) % 2 == 0)}
'''

HOLD = '''"""Holds a process at a point until a file is there, where a test asks for it."""

import os
import sys
import time

from streamrft.streams import faults

POINT, STAGE, FILE = (os.environ.get(f"HOLD_{name}", "") for name in ("AT", "IN", "UNTIL"))


def reach(point, step=None, usual=faults.reach):
    usual(point, step)
    if f"{point}@{step}" == POINT and (not STAGE or STAGE in sys.argv):
        while not os.path.exists(FILE):
            time.sleep(0.02)


if POINT:
    faults.reach = reach
'''


@dataclass
class SmallRun:
    """One job folder with its configuration; every method works on the same run."""

    folder: Path
    model: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    num_rows: int = 64
    stage: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        plugins = self.folder / "plugins"
        plugins.mkdir(exist_ok=True)
        (plugins / "parity.py").write_text(PLUGIN)
        (plugins / "hold.py").write_text(HOLD)
        rows = [{"prompt": f"{i:03d}?", "response": str(i)} for i in range(self.num_rows)]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        self.write()

    def write(self) -> None:
        """Write the configuration, JSON being YAML."""
        config: dict[str, Any] = {
            "project": "faults",
            "name": "small",
            "checkpoint_root_dir": str(self.folder / "runs"),
            "deterministic": True,
            "seed": 7,
            "algorithm": {
                "algorithm_type": "grpo",
                "repeat_times": 4,
                "kl_loss_fn": "none",
                "optimizer": {"lr": 1e-3},
            },
            "model": {
                "model_path": str(self.model),
                "max_prompt_tokens": 16,
                "max_response_tokens": 6,
            },
            "buffer": {
                "batch_size": 4,
                "total_steps": self.steps,
                "explorer_input": {
                    "taskset": {
                        "name": "rows",
                        "path": str(self.folder / "rows.jsonl"),
                        "default_workflow_type": "simple_workflow",
                        "default_reward_fn_type": "parity_reward",
                    }
                },
            },
            "explorer": {"rollout_model": {"engine_type": "transformers"}},
            "synchronizer": {"sync_style": "fixed", "sync_interval": 1, "sync_offset": 0},
            "trainer": {"save_interval": 2},
        }
        self.config.write_text(json.dumps(merge(config, self.overrides), indent=1))

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.folder / "small.yaml"

    @property
    def job(self) -> Path:
        """The job folder of the product."""
        return self.folder / "runs" / "faults" / self.name

    @property
    def topics(self) -> Topics:
        """Its topics, or those of the stage that is looked at."""
        return Topics(".".join(filter(None, ("faults", self.name, self.stage))))

    @property
    def name(self) -> str:
        """Its name; runs on one broker need different ones."""
        return self.overrides.get("name", "small")

    # --- processes

    def command(self, *words: str) -> list[str]:
        """A command line of the product on this run."""
        return [sys.executable, "-m", "streamrft.deploy.cli", *words, "--config", str(self.config)]

    def start(self, *, hold_at: str = "", **environment: str) -> subprocess.Popen[str]:
        """`streamrft run` in a session of its own, so that what it leaves behind can be found.

        `hold_at`: a point such as trainer.step_done@3, of `stage` if one is looked at, that no
        process passes before `let_go`. So nothing is over before the test does what it wants.
        """
        hold = {"HOLD_AT": hold_at, "HOLD_IN": self.stage, "HOLD_UNTIL": str(self._let_go_file)}
        with (self.folder / "run.log").open("a") as out:
            return subprocess.Popen(
                [*self.command("run"), "--plugin-dir", str(self.folder / "plugins")],
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **hold, **environment},
                start_new_session=True,
            )

    @property
    def _let_go_file(self) -> Path:
        return self.folder / "let go"

    def let_go(self) -> None:
        """From now on nothing is held."""
        self._let_go_file.touch()

    def finish(self, timeout_s: float = 480, **environment: str) -> None:
        """Run to the goal; whatever was there before, the same command ends with 0."""
        process = self.start(**environment)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"no end after {timeout_s} s\n{self.output()}") from None
        assert code == 0, f"exit code {code}\n{self.output()}"

    def finish_killed_at(self, *points: str) -> None:
        """As `finish`, while a process kills itself at each point, such as trainer.step_done@3."""
        markers = {point: self.folder / f"killed at {point}" for point in points}
        kills = ",".join(f"{point}={marker}" for point, marker in markers.items())
        self.finish(STREAMRFT_KILL_AT=kills)
        missed = [point for point, marker in markers.items() if not marker.exists()]
        assert not missed, f"the run never reached {missed}"

    def output(self) -> str:
        """What the run printed, and the ends of its processes' logs."""
        files = [self.folder / "run.log", *sorted(self.job.rglob("log/*.log"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in files if f.exists())

    def tool(self, *words: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        """Another command of the product on this run, such as status."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def children(self, name: str = "") -> list[psutil.Process]:
        """Living processes of this run, whoever their parent is, with `name` in their command."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.config) in words and name in " ".join(words):
                found.append(process)
        return found

    def living(self, role: str, run: subprocess.Popen[str]) -> list[psutil.Process]:
        """Processes of a role; after a kill they may not be started yet."""
        word = f" {role} "
        self.wait_for(lambda: self.children(word) or run.poll() is not None, role)
        found = self.children(word)
        assert found, f"no {role} is left\n{self.output()}"
        return found

    def kill_supervisor(self, run: subprocess.Popen[str]) -> None:
        """SIGKILL; none of its children outlives it."""
        assert run.poll() is None, f"the run was over before\n{self.output()}"
        run.kill()
        run.wait()
        self.wait_for(lambda: not self.children(), "end of the children", 60)

    def kill(self) -> None:
        """End everything that is left, in a test's tear-down."""
        for process in self.children():
            process.kill()

    def wait_for(self, ready: Any, what: str, timeout_s: float = 180) -> None:
        """Poll until `ready()`."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s\n{self.output()}"
            time.sleep(0.05)

    # --- the log

    def records(self, topic: str) -> list[Record]:
        """All records of a topic of the catalogue; none before the topic exists."""
        place = self.overrides.get("event_log", f"sqlite:///{self.job / 'log.db'}")
        url = place if isinstance(place, str) else place["url"]
        if url.startswith("sqlite") and not (self.job / "log.db").exists():
            return []
        log = open_log(url)
        try:
            return list(read_to_end(log, begins(log, self.topics.name(topic))))
        except UnknownTopic:
            return []
        finally:
            log.close()

    def events(self, topic: str, kind: type[E]) -> list[E]:
        """Its events of one kind."""
        decoded: Iterator[ev.Event] = (
            codec.decode(r.value, *CATALOGUE[topic].carries)
            for r in self.records(topic)
            if r.value is not None
        )
        return [event for event in decoded if isinstance(event, kind)]

    def cuts(self) -> list[ev.Cut]:
        """Cuts in order."""
        return sorted(self.events("train_steps", ev.Cut), key=lambda c: c.step)

    def final_digest(self) -> str:
        """SHA-256 of the weights after the last step."""
        found = [c for c in self.events("checkpoints", ev.Checkpoint) if c.step == self.steps]
        assert found, f"no checkpoint of step {self.steps}\n{self.output()}"
        assert len({c.digest for c in found}) == 1, "one version, two digests"
        return found[0].digest

    def check_whole(self) -> None:
        """The promises that hold after any run, however often it was killed."""
        status = self.tool("status")
        assert status.returncode == 0, f"{status.stdout}\n{status.stderr}\n{self.output()}"
        cuts = self.cuts()
        assert [c.step for c in cuts] == list(range(1, self.steps + 1))
        trained = [m.trajectory_id for c in cuts for m in c.members]
        assert len(trained) == len(set(trained)), "a trajectory was trained by two steps"
        deadline = time.monotonic() + 60
        while (left := self.children()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left over: {[' '.join(p.cmdline()) for p in left]}"


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged
