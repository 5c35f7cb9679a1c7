"""What a run has done so far, folded from the log a little at a time; the display shows it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from ...schemas import events as ev
from ...schemas.topics import CATALOGUE
from ...streams.log import Log, Partition, Record
from ...streams.reading import drain, event_in
from ..goal import lag
from ..plan import Stage

_KEPT_STEPS = 512
_HEARTBEATS_BACK_MS = 30_000
_MAX_RECORDS = 5_000
_FOLLOWED = ("train_steps", "checkpoints", "drops", "heartbeats")


@dataclass
class Progress:
    """Numbers of one stage. A new one knows all that the log holds; `refresh` never blocks."""

    log: Log
    stage: Stage
    steps: deque[ev.TrainStep] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    new_steps: list[ev.TrainStep] = field(default_factory=list)
    processes: dict[str, ev.Heartbeat] = field(default_factory=dict)
    drops: dict[str, int] = field(default_factory=dict)
    num_taken: int = 0
    branch: str = "main"
    saved: ev.Checkpoint | None = None
    unjoined: int = 0
    ready: int = 0
    tasks_left: int = 0

    def __post_init__(self) -> None:
        self._consumer = self.log.consumer()
        self._full_names = {self.stage.topics.name(t): t for t in _FOLLOWED}
        begin: dict[Partition, int] = {}
        for name, info in self.log.describe(list(self._full_names)).items():
            places = [Partition(name, p) for p in info.begin]
            if self._full_names[name] == "heartbeats":
                since = ev.now_ms() - _HEARTBEATS_BACK_MS
                begin |= self.log.offsets_at(places, since)
            else:
                begin |= {p: info.begin[p.partition] for p in places}
        # a fork is known before the steps on it are looked at
        branches = self.stage.topics.name("checkpoints")
        self._catch_up({p: at for p, at in begin.items() if p.topic == branches})
        self._catch_up(begin | self._consumer.positions())
        self.new_steps = []

    def _catch_up(self, begin: dict[Partition, int]) -> None:
        """Fold to the present ends: Kafka brings nothing at a first poll. Raises as `drain`."""
        self._consumer.assign(begin)
        for record in drain(self.log, self._consumer):
            self._fold(record)

    def refresh(self) -> None:
        """Fold what came since the last call, at most a few thousand records."""
        self.new_steps = []
        # a fork is known before the steps on it are looked at
        branches = self.stage.topics.name("checkpoints")
        records = self._consumer.poll(_MAX_RECORDS)
        for record in sorted(records, key=lambda r: r.topic != branches):
            self._fold(record)
        topics, space = self.stage.topics, self.stage.namespace
        if self.stage.streams:
            self.unjoined = lag(self.log, topics.name("trajectories"), f"{space}.join")
            self.tasks_left = lag(self.log, topics.name("tasks"), f"{space}.explorers")
            # the joins count what they wrote; offsets may have holes between the records
            written = sum(h.metrics.get("experiences", 0) for h in self._living("join"))
            self.ready = max(0, int(written) - self.num_taken)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.steps[-1].step if self.steps else 0

    @property
    def waiting_for_rewards(self) -> int:
        """Trajectories in the join's open groups, as the joins say themselves."""
        return int(sum(h.metrics.get("pending", 0) for h in self._living("join")))

    def metric(self, name: str) -> float | None:
        """A metric of the last step."""
        return self.steps[-1].metrics.get(name) if self.steps else None

    def curve(self, name: str) -> list[float]:
        """A metric of the steps that are kept."""
        return [s.metrics[name] for s in self.steps if name in s.metrics]

    def age_s(self, process: str) -> float | None:
        """Seconds since the last heartbeat of a process; None before the first."""
        beat = self.processes.get(process)
        return None if beat is None else max(0.0, time.time() - beat.produced_at / 1000)

    def _living(self, role: str) -> list[ev.Heartbeat]:
        return [h for h in self.processes.values() if h.role == role and h.state != "ended"]

    def _fold(self, record: Record) -> None:
        topic = self._full_names[record.topic]
        event = event_in(record, *CATALOGUE[topic].carries)
        if isinstance(event, ev.TrainStep):
            if event.branch != self.branch:
                return
            self.steps.append(event)
            self.new_steps.append(event)
        elif isinstance(event, ev.Cut):
            self.num_taken += len(event.members)
        elif isinstance(event, ev.Checkpoint):
            self.saved = event if event.kind == "full" else self.saved
        elif isinstance(event, ev.Branch):
            self._fork(event)
        elif isinstance(event, ev.Drop):
            self.drops[event.reason] = self.drops.get(event.reason, 0) + 1
            self.num_taken += event.where == "trainer"
        elif isinstance(event, ev.Heartbeat):
            self.processes[event.process] = event

    def _fork(self, event: ev.Branch) -> None:
        if event.branch == self.branch:
            return
        self.branch = event.branch
        kept = [s for s in self.steps if s.step <= event.step]
        self.steps = deque(kept, maxlen=_KEPT_STEPS)
