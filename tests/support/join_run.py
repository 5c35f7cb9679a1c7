"""A join worker on a log: driven inside the test, or as a process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics, key_of
from streamrft.streams.log import Consumer, Log, Position, Record, topic_specs
from streamrft.streams.outbox import COUNTERS_KEY, read_counters
from streamrft.streams.process import Process
from streamrft.streams.reading import begins
from streamrft.streams.settings import StreamSettings
from streamrft.streams.worker import run_join

E = TypeVar("E", bound=ev.Event)
DEADLINE_S = 120.0


class JoinRun:
    """The topics of one run, how to write to them, and what came out."""

    def __init__(
        self,
        log: Log,
        *,
        namespace: str = "test.join",
        num_partitions: int = 4,
        engine: Literal["native", "faust"] = "native",
    ) -> None:
        self.log, self.topics, self._engine = log, Topics(namespace, num_partitions), engine
        log.ensure_topics(topic_specs(self.topics))
        self._producer = log.producer()
        self._read: dict[str, tuple[Consumer, list[Record]]] = {}

    def send(self, *events: ev.Trajectory | ev.Reward, **place: Any) -> list[Position]:
        """Append events under their own keys, all at once."""
        for event in events:
            topic = "trajectories" if isinstance(event, ev.Trajectory) else "rewards"
            value = codec.encode(event)
            self._producer.send(
                self.topics.name(topic), value, **({"key": key_of(event, topic)} | place)
            )
        return self._producer.flush()

    def send_raw(self, topic: str, value: bytes | None, **place: Any) -> Position:
        self._producer.send(self.topics.name(topic), value, **place)
        return self._producer.flush()[0]

    def records(self, topic: str) -> list[Record]:
        """Everything on a topic, partition by partition; what was read once is not read again."""
        if topic not in self._read:
            reader = self.log.consumer()
            reader.assign(begins(self.log, self.topics.name(topic)))
            self._read[topic] = reader, []
        reader, found = self._read[topic]
        ends = self.log.end_offsets(reader.assignment())
        deadline = time.monotonic() + DEADLINE_S
        while any(reader.positions()[p] < end for p, end in ends.items()):
            assert time.monotonic() < deadline, f"{topic}: not read within {DEADLINE_S} s"
            found += reader.poll(5_000)
        return sorted(found, key=lambda r: (r.partition, r.offset))

    def events(self, topic: str, cls: type[E]) -> list[E]:
        """Events of a topic."""
        return [codec.decode(r.value, cls) for r in self.records(topic)]

    def num(self, topic: str) -> int:
        """Records on a topic; offsets would count the markers of transactions on Kafka."""
        return len(self.records(topic))

    def experiences(self) -> list[ev.Experience]:
        return self.events("experiences", ev.Experience)

    def drops(self) -> list[ev.Drop]:
        return self.events("drops", ev.Drop)

    def dead_letters(self) -> list[ev.DeadLetter]:
        return self.events("dead_letters", ev.DeadLetter)

    def counters(self) -> dict[str, int]:
        return read_counters(self.log, self.topics)

    def states(self) -> dict[bytes, bytes | None]:
        """Last state record of every group."""
        return {r.key or b"": r.value for r in self.records("join_state") if r.key != COUNTERS_KEY}

    def ends(self) -> list[str]:
        """Ids with a final state of the join, each as often as it was told."""
        first = [e for e in self.experiences() if not e.reward_revision]
        return sorted([e.trajectory_id for e in first] + [d.trajectory_id for d in self.drops()])

    def drive(
        self,
        until: Callable[[], bool],
        settings: StreamSettings | None = None,
        *,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """Run a worker in this thread until `until()` is true, then stop it in order."""
        self.process = DrivenProcess(self.log, self.topics, until, timeout_s)
        run_join(self.process, replace(settings or StreamSettings(), engine=self._engine))

    def spawn(self, url: str, **arguments: Any) -> JoinProcess:
        settings = {**arguments.pop("settings", {}), "engine": self._engine}
        return JoinProcess(url, self.topics, settings=settings, **arguments)


class DrivenProcess(Process):
    """Stops its role once a condition holds; fails when it never does."""

    def __init__(
        self, log: Log, topics: Topics, until: Callable[[], bool], timeout_s: float
    ) -> None:
        super().__init__(log, topics, name="join-0", role="join")
        self._until, self._deadline = until, time.monotonic() + timeout_s
        self.blockers: list[str] = []

    @property
    def is_stopping(self) -> bool:
        assert time.monotonic() < self._deadline, f"not done; it waited for {self.blockers[-3:]}"
        return self._until()

    def idle(self, waiting_for: str) -> None:
        if self.blockers[-1:] != [waiting_for]:
            self.blockers.append(waiting_for)
        super().idle(waiting_for)


class JoinProcess:
    """A join worker in a process of its own. Killed when the block ends."""

    def __init__(
        self,
        url: str,
        topics: Topics,
        *,
        name: str = "join-0",
        session_ms: int = 1_500,
        settings: Mapping[str, Any] | None = None,
        kill_at: str = "",
        pause_at: str = "",
    ) -> None:
        environment = dict(os.environ)
        environment.pop("STREAMRFT_KILL_AT", None)
        if kill_at:
            environment["STREAMRFT_KILL_AT"] = kill_at
        script = Path(__file__).with_name("join_worker.py")
        arguments = dict(
            url=url,
            session_ms=session_ms,
            namespace=topics.namespace,
            num_partitions=topics.num_partitions,
            name=name,
            settings=dict(settings or {}),
            pause_at=pause_at,
        )
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(arguments)], env=environment
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def is_paused(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    @property
    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout=timeout_s)

    def __enter__(self) -> JoinProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)


def ids(events: Iterable[Any]) -> list[str]:
    """Sorted trajectory ids."""
    return sorted(e.trajectory_id for e in events)
