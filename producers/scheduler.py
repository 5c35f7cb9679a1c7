"""The scheduler's shell: follow the log, publish tasks in fenced transactions, say when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import msgspec

from ..schemas import codec
from ..schemas import events as ev
from ..schemas.errors import InvalidEvent, UndecodableRecord
from ..schemas.topics import CATALOGUE, key_of
from ..streams import faults
from ..streams.lineage import Lineage, surviving_branch, surviving_lineage
from ..streams.log import Consumer, Lease, Record
from ..streams.process import Process, until_answered
from ..streams.reading import begins, drain, read_events
from .settings import SchedulerSettings
from .tasksets import Tasksets
from .window import Publication, Window

logger = logging.getLogger("streamrft")

_FOLLOWED = ("train_steps", "drops", "checkpoints", "trajectories")
_MOST_AT_ONCE = 500
_BRANCH_TIMEOUT_MS = 1_800_000


def run_scheduler(process: Process, settings: SchedulerSettings) -> None:
    """Publish the tasks of a run until nothing remains, or the process is stopped.

    Raises:
        Fenced: a successor took the lease; nothing was published after that.
        Timeout: a living scheduler holds the lease.
        ConfigError: a taskset or a row cannot be read.
    """
    rows = Tasksets.open(settings.tasksets)
    lease = process.acquire("scheduler", settings.lease_ms)
    if lease is None:
        return
    try:
        scheduler = Scheduler(process, settings, rows, lease)
        while not process.is_stopping and not until_answered(scheduler.turn, process.idle):
            pass
    finally:
        process.log.release(lease)


class Scheduler:
    """One holder of the lease.

    reading the log from its start -> following it -> done; a new branch begins at the start.
    """

    def __init__(
        self, process: Process, settings: SchedulerSettings, rows: Tasksets, lease: Lease
    ) -> None:
        self._process, self._settings, self._rows, self._lease = process, settings, rows, lease
        self._log, self._topics = process.log, process.topics
        self._producer = self._log.producer(fence=lease)
        self._renewed = time.monotonic()
        self._branches: list[ev.Branch] = []
        self._window: Window | None = None

    def turn(self) -> bool:
        """Fold what came, publish what is due; True when nothing remains to do."""
        if self._window is None:
            self._window = self._read_from_start()
            return False
        window = self._window
        self._renew()
        for record in self._consumer.poll(2_000, 100):
            self._fold(window, record)
        if self._lineage() != self._followed:
            self._window = None
            return False
        self._follow_experiences(window)
        is_done = self._publish(window)
        self._say(window)
        return is_done

    def _read_from_start(self) -> Window | None:
        """Read checkpoints for the branches, then the tasks, then all that happened to them."""
        saved = read_events(self._log, self._topics, "checkpoints")
        self._branches = [e for e in saved if isinstance(e, ev.Branch)]
        if not self._is_on_branch():
            self._await_branch()
            return None
        self._followed = self._lineage()
        window = Window(self._settings, self._rows, self._followed)
        for task in self._published(window):
            window.on_task(task)
        self._experiences: Consumer | None = None
        self._consumer = self._consumer_of(*_FOLLOWED)
        for record in drain(self._log, self._consumer):
            self._renew()
            self._fold(window, record)
        self._follow_experiences(window)
        return window

    def _published(self, window: Window) -> list[ev.Task]:
        """Every task on the log by number, without its content; says the ends on the way."""
        tasks: list[ev.Task] = []
        for event in read_events(self._log, self._topics, "tasks"):
            self._renew()
            if isinstance(event, ev.Ended):
                window.on_ended(event)
            elif isinstance(event, ev.Task):
                tasks.append(msgspec.structs.replace(event, content=""))
        return sorted(tasks, key=lambda task: task.number)

    def _is_on_branch(self) -> bool:
        """A fork is published for only when the trainer has announced it."""
        wanted = self._settings.branch
        return wanted in ("main", surviving_branch(self._branches))

    def _await_branch(self) -> None:
        consumer = self._consumer_of("checkpoints")

        def is_announced() -> bool:
            self._renew()
            for record in consumer.poll(500, 500):
                event = self._decode(record)
                if isinstance(event, ev.Branch):
                    self._branches.append(event)
            return self._is_on_branch()

        self._branches = []
        self._process.wait_until(
            is_announced,
            f"the trainer to announce branch {self._settings.branch}",
            _BRANCH_TIMEOUT_MS,
            "Start the trainer, or take resume_from and branch out of the configuration.",
        )

    def _lineage(self) -> Lineage:
        return surviving_lineage(self._branches)

    def _fold(self, window: Window, record: Record) -> None:
        event = self._decode(record)
        if isinstance(event, ev.Trajectory):
            window.on_trajectory(event, record.timestamp_ms)
        elif isinstance(event, ev.Drop):
            window.on_drop(event)
        elif isinstance(event, ev.Cut):
            window.on_cut(event)
        elif isinstance(event, ev.Checkpoint):
            window.on_checkpoint(event)
        elif isinstance(event, ev.Branch) and event not in self._branches[-1:]:
            self._branches.append(event)

    def _follow_experiences(self, window: Window) -> None:
        """Only their keys count, and only in a run whose rewards come from outside."""
        if self._experiences is None:
            if not window.awaits_rewards:
                return
            self._experiences = self._consumer_of("experiences")
            records: Iterable[Record] = drain(self._log, self._experiences)
        else:
            records = self._experiences.poll(2_000, 0)
        for record in records:
            self._renew()
            window.on_experience((record.key or b"").decode(errors="replace"))

    def _consumer_of(self, *topics: str) -> Consumer:
        consumer = self._log.consumer()
        consumer.assign(begins(self._log, *(self._topics.name(t) for t in topics)))
        return consumer

    def _decode(self, record: Record) -> ev.Event | None:
        """The event; None for a poison record, which its own reader dead-letters."""
        kinds = CATALOGUE[self._topics.short(record.topic)].carries
        try:
            return codec.decode(record.value or b"", *kinds)
        except (UndecodableRecord, InvalidEvent) as error:
            logger.warning(
                "scheduler leaves out %s[%d]@%d: %s",
                record.topic,
                record.partition,
                record.offset,
                error,
            )
            return None

    def _publish(self, window: Window) -> bool:
        """Publish what is due; True when the run is over and has been said so."""
        due = window.plan(ev.now_ms(), _MOST_AT_ONCE)
        if due:
            tasks = [self._task(p, window.branch) for p in due]
            self._commit(tasks)
            for task in tasks:
                window.on_task(task)
            return False
        ended = window.end(ev.now_ms())
        if ended is not None:
            self._commit([ended])
            window.on_ended(ended)
            logger.info("scheduler: %d groups in all, no more will come", ended.num_groups)
        return ended is None and window.is_done

    def _commit(self, events: list[ev.Task] | list[ev.Ended]) -> None:
        """One transaction. Raises LogUnavailable: nothing was published, plan again."""
        topic = self._topics.name("tasks")
        step = events[0].step if isinstance(events[0], ev.Task) else None
        with self._producer.transaction():
            for event in events:
                partition = 0 if isinstance(event, ev.Ended) else None
                self._producer.send(
                    topic, codec.encode(event), key=key_of(event, "tasks"), partition=partition
                )
            faults.reach("scheduler.before_commit", step)
        faults.reach("scheduler.committed", step)

    def _task(self, publication: Publication, branch: str) -> ev.Task:
        ref = publication.ref
        content, workflow, reward_fn = self._rows.read(ref)
        return ev.Task(
            group_id=f"{ref.taskset}.{publication.number}",
            number=publication.number,
            taskset=ref.taskset,
            row=ref.row,
            epoch=ref.epoch,
            branch=branch,
            step=publication.step,
            min_policy_version=publication.min_policy_version,
            group_size=self._settings.group_size,
            workflow=workflow,
            reward_fn=reward_fn,
            replaces=publication.replaces,
            content=content,
            produced_at=ev.now_ms(),
        )

    def _renew(self) -> None:
        if time.monotonic() - self._renewed > self._settings.lease_ms / 3000:
            self._log.renew(self._lease)
            self._renewed = time.monotonic()

    def _say(self, window: Window) -> None:
        counts = {
            "num_groups": float(window.num_in_lineage),
            "num_outstanding": float(window.num_outstanding),
            "num_parked": float(window.num_parked),
        }
        self._process.metrics.update(counts)
        if window.num_allowed:
            self._process.alive()
        else:
            self._process.idle(window.blocker())
