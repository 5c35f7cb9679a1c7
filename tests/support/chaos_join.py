"""Join workers as the command line starts them, on a log, while members come, go and die."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from cli_run import CONFIG
from small_run import merge

from streamrft.deploy.plan import plan
from streamrft.schemas.errors import LogUnavailable
from streamrft.schemas.events import now_ms
from streamrft.streams.outbox import COUNTERS_KEY
from streamrft.streams.reading import begins

PROGRAM = ("-m", "streamrft.deploy.cli")
START_S, END_S = 180.0, 120.0
LOOK_S = 0.05


class Place:
    """A run of join workers alone: its configuration, its topics and its log."""

    def __init__(self, folder: Path, url: str, changes: Mapping[str, Any]) -> None:
        self.folder, self.config = folder, folder / "run.yaml"
        own = {
            "checkpoint_root_dir": str(folder / "runs"),
            "event_log": {"url": url},
            "streams": {"grace_ms": 0},
        }
        self.config.write_text(json.dumps(merge(merge(CONFIG, own), changes)))
        run = plan(self.config)
        self.topics = run.stage(None).topics
        self.log = run.open_log()
        self.log.ensure_topics(run.topic_specs(run.stage(None)))

    def command(self, *words: str, program: Sequence[str] = PROGRAM) -> list[str]:
        """A command line of the product on this run."""
        return [sys.executable, *program, *words, "--config", str(self.config)]

    def status(self) -> subprocess.CompletedProcess[str]:
        """The ledger, counted from the first record."""
        words = self.command("status", "--full", "--json")
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


class JoinWorker:
    """One `streamrft join`. started -> ready -> asked to end or killed -> gone"""

    def __init__(self, command: list[str], name: str, folder: Path) -> None:
        self.name, self.path = name, folder / f"{name}.log"
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        with self.path.open("a") as out:
            out.write(f"--- started at {time.strftime('%T')}\n")
            out.flush()
            self.process = subprocess.Popen(
                [*command, "--name", name], stdout=out, stderr=out, env=environment
            )

    @property
    def is_ready(self) -> bool:
        """Whether it hears SIGTERM; before, it has nothing to end in order."""
        if self.process.poll() is not None:
            return False
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    @property
    def found_no_broker(self) -> bool:
        """Whether it ended because no broker answered when it began, and said so."""
        if self.process.poll() != 1:
            return False
        last = self.path.read_text().rpartition("--- started")[2].splitlines()[-1]
        is_away = "Last heard of" in last or "The brokers are" in last
        return last.startswith("streamrft join: ") and is_away

    def tail(self, what: str) -> str:
        """Its log, for a message; where it stands, if it still does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)  # faulthandler writes every thread's stack
            self.process.wait(60)
        return f"{self.name} {what} ({self.process.poll()})\n{self.path.read_text()[-6000:]}"


class Watch:
    """Follows the join's counters on the log: how much each partition has processed, and when."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._reader = place.log.consumer()
        self._reader.assign(begins(place.log, place.topics.name("join_state")))
        self.counters: dict[int, dict[str, int]] = {}
        self.moves: dict[int, list[int]] = {p: [] for p in range(place.topics.num_partitions)}

    def look(self) -> None:
        """Take in what was committed since the last look."""
        try:
            records = self._reader.poll(10_000, 0)
        except LogUnavailable:
            return
        for record in records:
            if record.key != COUNTERS_KEY or record.value is None:
                continue
            found = msgspec.msgpack.decode(record.value, type=dict[str, int])
            if num_read(found) > num_read(self.counters.get(record.partition, {})):
                self.moves[record.partition].append(record.timestamp_ms)
            self.counters[record.partition] = found

    def total(self, name: str) -> int:
        """A counter over all partitions."""
        return sum(found.get(name, 0) for found in self.counters.values())

    def totals(self) -> dict[str, int]:
        """All counters over all partitions."""
        return {name: self.total(name) for found in self.counters.values() for name in found}

    def still_s(self) -> float:
        """Seconds since anything moved."""
        return (now_ms() - max(max(m, default=0) for m in self.moves.values())) / 1000

    def waits_s(self, kills: Sequence[int]) -> list[float]:
        """For each kill, seconds until every partition had moved; never moved is infinite.

        Counted from the last kill before the move: each may cost a session.
        """
        waits: list[float] = []
        for at in kills:
            firsts = [next((t for t in m if t > at), math.inf) for m in self.moves.values()]
            waits.append(max((t - max(k for k in kills if k < t)) / 1000 for t in firsts))
        return waits


def num_read(counters: Mapping[str, int]) -> int:
    """Records that a partition has processed, by its counters."""
    return sum(counters.get(name, 0) for name in ("trajectories", "rewards", "dead_letters"))


@dataclass
class Crowd:
    """The living join workers of one run, and everything that must hold for each at all times."""

    place: Place
    options: list[str]
    rng: random.Random
    program: Sequence[str] = PROGRAM
    started: list[JoinWorker] = field(default_factory=list)
    living: list[JoinWorker] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    kills: list[tuple[str, int]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    num_named: int = 0
    has_outages: bool = False

    def __post_init__(self) -> None:
        self.watch = Watch(self.place)

    def start(self) -> None:
        """One more, under the name of a gone one or a new one."""
        if self.free and self.rng.random() < 0.5:
            name = self.free.pop(self.rng.randrange(len(self.free)))
        else:
            name, self.num_named = f"join-{self.num_named}", self.num_named + 1
        self.living.append(self._started(name))

    def _started(self, name: str) -> JoinWorker:
        command = self.place.command("join", *self.options, program=self.program)
        self.started.append(JoinWorker(command, name, self.place.folder))
        return self.started[-1]

    def kill(self) -> None:
        """SIGKILL to one."""
        self._look()
        worker = self._leave(self.rng.randrange(len(self.living)))
        worker.process.kill()
        worker.process.wait(60)
        self.mark(worker.name)

    def mark(self, name: str) -> None:
        """Something that work has to go on after."""
        self.kills.append((name, now_ms()))

    def term(self) -> None:
        """SIGTERM to one, which has to end in order and in time."""
        i = self.rng.randrange(len(self.living))
        self._await_ready(i)
        self._end([self._leave(i)])

    def _await_ready(self, i: int) -> None:
        self.pass_until(
            lambda: self.living[i].is_ready, START_S, lambda: self.living[i].tail("is not ready")
        )

    def broker_is_back(self) -> None:
        """Nothing goes on without a broker, so time counts from now on."""
        self.mark("broker")

    def _leave(self, i: int) -> JoinWorker:
        worker = self.living.pop(i)
        self.free.append(worker.name)
        return worker

    def _end(self, workers: list[JoinWorker]) -> None:
        begin = time.monotonic()
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in workers:
            self.pass_until(
                lambda w=worker: w.process.poll() is not None,
                END_S - (time.monotonic() - begin),
                lambda w=worker: w.tail(f"did not end within {END_S:g} s of SIGTERM"),
            )
            self.ends_s.append(time.monotonic() - begin)
            assert worker.process.returncode == 0, worker.tail("did not end in order")

    def end_all(self) -> None:
        """SIGTERM to everyone that is left."""
        for i in range(len(self.living)):
            self._await_ready(i)
        leaving, self.living = self.living, []
        self._end(leaving)

    def close(self) -> None:
        """Leave nothing behind, in a test's tear-down."""
        for worker in self.started:
            worker.process.kill()
            worker.process.wait(60)

    def pause(self, seconds: float) -> None:
        """Watch for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()

    def pass_until(
        self, ready: Callable[[], bool], timeout_s: float, why: Callable[[], str]
    ) -> None:
        """Watch until it is so; an error at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < deadline, why()
            self._look()

    def _look(self) -> None:
        self.watch.look()
        for i, worker in enumerate(self.living):
            if self.has_outages and worker.found_no_broker:
                self.living[i] = self._started(worker.name)  # as a supervisor does
            else:
                assert worker.process.poll() is None, worker.tail("ended by itself")
        time.sleep(LOOK_S)


def plan_of(rng: random.Random) -> list[str]:
    """Ten membership changes in random order that leave one to four alive, from two on."""
    changes = ["start"] * 5 + ["kill"] * 3 + ["term"] * 2
    while True:
        rng.shuffle(changes)
        alive, lives = 2, []
        for change in changes:
            alive += 1 if change == "start" else -1
            lives.append(alive)
        if min(lives) >= 1 and max(lives) <= 4:
            return changes
