"""The explorer's shell: take tasks, roll them out, publish trajectories, then commit the tasks."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from ..schemas import codec
from ..schemas import events as ev
from ..schemas.errors import (
    Fenced,
    InvalidEvent,
    StreamrftError,
    Timeout,
    UndecodableRecord,
)
from ..schemas.topics import CATALOGUE
from ..streams import faults
from ..streams.log import Consumer, Partition, Record
from ..streams.process import Process, until_answered
from ..streams.reading import begins, drain
from .announced import Announced
from .engines.service import EngineService
from .outbox import Outbox
from .progress import Progress, Ticket
from .rewards.verifier import VERIFIER
from .rollout_loop import Outcome, RolloutLoop
from .rollouts import GroupRunner, workflow_and_reward
from .settings import ExplorerSettings

logger = logging.getLogger("streamrft")

_RATE_WINDOW_S = 10.0
_WAIT_S, _GATHER_S = 0.2, 0.005
_MOST_LOST = 64


class AllFailed(StreamrftError):
    """Nothing that this explorer rolls out succeeds."""


def run_explorer(process: Process, settings: ExplorerSettings) -> None:
    """Roll out tasks until the process is stopped.

    Raises:
        ConfigError: a workflow or reward function of a taskset is unknown.
        Timeout: weights did not come in time, or a deterministic run's rollout took too long.
        EngineError: the engine or its weights are broken.
        AllFailed: 64 groups in a row failed in every slot.
    """
    for taskset in settings.tasksets:
        workflow_and_reward(taskset, taskset.workflow, taskset.reward_fn)
    explorer = Explorer(process, settings)
    try:
        while not process.is_stopping:
            explorer.turn()
    finally:
        explorer.close()


class Explorer:
    """One member of the explorers' group. Belongs to the thread that owns the log.

    A task: taken -> rolled out -> published -> committed. Killed anywhere, it is taken again.
    """

    def __init__(self, process: Process, settings: ExplorerSettings) -> None:
        self._process, self._settings = process, settings
        self._log, self._topics = process.log, process.topics
        self._announced, self._progress = Announced(), Progress()
        self._waiting: deque[Ticket] = deque()
        self._waiting_since: float | None = None
        self._num_running = self._num_lost = 0
        self._service = EngineService(settings)
        self._loop = RolloutLoop(GroupRunner(settings, self._service, process.name), self._service)
        self._rate = _Rate()
        self._outbox = Outbox(process)
        self._checkpoints = self._log.consumer()
        self._checkpoints.assign(begins(self._log, self._topics.name("checkpoints")))
        self._tasks = self._log.consumer(
            group=f"{self._topics.namespace}.explorers", member=process.name
        )
        self._tasks.subscribe([self._topics.name("tasks")], on_revoke=self._give_up)
        self._most_running = 1 if settings.deterministic else settings.runner_per_model

    def turn(self) -> None:
        """Follow weights, take tasks, start what can start, publish what has ended."""
        self._follow_weights()
        self._take()
        self._start()
        self._publish(self._ended())
        self._say()

    def close(self) -> None:
        """Leave the group at once; what is not published stays unacknowledged."""
        try:
            self._tasks.close()
            self._checkpoints.close()
        finally:
            self._loop.stop()
            VERIFIER.close()

    def _follow_weights(self) -> None:
        waits = bool(self._waiting) and not self._num_running
        self._follow(self._polled(self._checkpoints, 500, 100 if waits else 0))

    def _follow(self, records: Iterable[Record]) -> None:
        for record in records:
            event = self._decode(record)
            if isinstance(event, (ev.Checkpoint, ev.Branch)):
                self._announced.on_event(event)
        self._service.wanted = self._announced.newest

    def _follow_fork(self) -> None:
        """A fork is announced before its tasks, but they may be read before it."""
        tasks = [ticket.task for ticket in self._waiting if ticket.task]
        if not all(self._announced.is_paced(task) for task in tasks):
            until_answered(
                lambda: self._follow(drain(self._log, self._checkpoints)), self._process.idle
            )

    def _polled(self, consumer: Consumer, max_records: int, timeout_ms: int) -> list[Record]:
        return until_answered(lambda: consumer.poll(max_records, timeout_ms), self._process.idle)

    def _take(self) -> None:
        """Read on while fewer tasks wait than run at a time; polling also keeps the leases."""
        room = self._most_running - len(self._waiting)
        if room <= 0:
            self._tasks.pause(self._tasks.assignment())
        is_idle = not self._num_running and not self._waiting
        records = self._polled(self._tasks, max(1, room), 200 if is_idle else 0)
        if room <= 0:
            self._tasks.resume(self._tasks.assignment())
        for record in records:
            ticket = Ticket(Partition(record.topic, record.partition), record.offset)
            self._progress.take(ticket)
            event = self._decode(record)
            if isinstance(event, ev.Task):
                ticket.task = event
                self._waiting.append(ticket)
            else:
                ticket.is_done = True
        if records:
            self._waiting = deque(sorted(self._waiting, key=_number))
            self._follow_fork()
            if not self._num_running:
                self._commit()

    def _start(self) -> None:
        """Start waiting tasks, the oldest first, whose weights are announced."""
        newest = self._announced.newest
        ready: list[tuple[Ticket, int]] = []
        if newest is not None:
            free = self._most_running - self._num_running
            for ticket in list(self._waiting):
                if len(ready) >= free:
                    break
                assert ticket.task is not None
                version = self._announced.version_for(ticket.task)
                if version <= newest.step:
                    ready.append((ticket, version))
        if ready:
            started = {id(t) for t, _ in ready}
            self._waiting = deque(t for t in self._waiting if id(t) not in started)
            self._num_running += len(ready)
            self._loop.start(ready)
        self._check_wait()

    def _check_wait(self) -> None:
        """Nothing runs and nothing can start: that has a deadline."""
        if self._num_running or not self._waiting:
            self._waiting_since = None
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since > self._settings.weights_timeout_ms / 1000:
            raise Timeout(
                f"{self._process.name}: {self._blocker()}",
                self._settings.weights_timeout_ms,
                "See what the trainer waits for, or raise synchronizer.sync_timeout.",
            )

    def _blocker(self) -> str:
        if self._service.blocker:
            return self._service.blocker
        newest = self._announced.newest
        have = f"policy_version {newest.step} is the newest" if newest else "there is none yet"
        if not self._waiting:
            return "tasks" if newest else f"tasks and the first checkpoint ({have})"
        task = self._waiting[0].task
        assert task is not None
        return (
            f"policy_version {self._announced.version_for(task)} on branch "
            f"{self._announced.branch} for {task.group_id}; {have}"
        )

    def _give_up(self, partitions: list[Partition]) -> None:
        """Partitions go to another member, which rolls their open tasks out itself."""
        lost = self._progress.give_up(partitions)
        self._loop.cancel(lost)
        self._waiting = deque(t for t in self._waiting if not t.is_given_up)

    def _ended(self) -> list[Outcome]:
        """What has ended; waits a little for the first, less for those that end with it."""
        ended: list[Outcome] = []
        deadline = time.monotonic() + _WAIT_S
        with suppress(queue.Empty):  # what still runs is gathered by a later turn
            while len(ended) < self._num_running:
                left_s = deadline - time.monotonic()
                ended.append(self._loop.outcomes.get(timeout=max(0.0, left_s)))
                deadline = min(deadline, time.monotonic() + _GATHER_S)
        return ended

    def _publish(self, ended: list[Outcome]) -> None:
        """Trajectories first, acknowledged; then the tasks that they end."""
        self._service.check()
        kept = []
        for outcome in ended:
            self._num_running -= 1
            if outcome.error is not None:
                raise outcome.error
            if not outcome.ticket.is_given_up:
                kept.append(outcome)
        if not kept:
            return
        step = kept[0].ticket.task.step if kept[0].ticket.task else None
        faults.reach("explorer.generated", step)
        records = [r for o in kept if o.rolled for r in o.rolled.records]
        self._outbox.send("trajectories", records)
        faults.reach("explorer.published", step)
        for outcome in kept:
            outcome.ticket.is_done = True
        self._commit()
        faults.reach("explorer.committed", step)
        self._check_health(kept)

    def _check_health(self, kept: list[Outcome]) -> None:
        """Where every rollout fails, going on would only use up the rows."""
        for rolled in (o.rolled for o in kept if o.rolled):
            self._num_lost = self._num_lost + 1 if rolled.num_failed == len(rolled.records) else 0
            if self._num_lost >= _MOST_LOST:
                raise AllFailed(
                    f"{self._process.name}: all rollouts of the last {_MOST_LOST} groups failed; "
                    f"the last: {rolled.failure.rstrip('.')}. Mend the workflow, reward or taskset."
                )

    def _commit(self) -> None:
        positions = self._progress.finish(self._tasks.positions())
        try:
            until_answered(lambda: self._tasks.commit(positions), self._process.idle)
        except Fenced:
            self._commit_owned(positions)

    def _commit_owned(self, positions: dict[Partition, int]) -> None:
        """One by one: a lost partition's new owner rolls out again, the join keeps the first."""
        for partition, offset in positions.items():
            try:
                self._tasks.commit({partition: offset})
            except Fenced as error:
                logger.warning("%s: %s", self._process.name, error)

    def _decode(self, record: Record) -> ev.Event | None:
        """The event, or None; a poison task becomes a dead letter."""
        kinds = CATALOGUE[self._topics.short(record.topic)].carries
        try:
            return codec.decode(record.value or b"", *kinds)
        except (UndecodableRecord, InvalidEvent) as error:
            if record.topic == self._topics.name("tasks"):
                self._outbox.dead_letter(record, error)
            else:
                logger.warning("%s leaves out %s: %s", self._process.name, record.position, error)
            return None

    def _say(self) -> None:
        self._process.metrics.update(
            tokens_per_s=self._rate.of(self._service.num_tokens),
            policy_version=float(self._service.policy_version),
            num_running=float(self._num_running),
        )
        loading = self._service.loading
        if loading is None:
            self._process.metrics.pop("loading_version", None)
        else:
            self._process.metrics["loading_version"] = float(loading.step)
        if self._num_running and not self._service.blocker:
            self._process.alive()
        else:
            self._process.idle(self._blocker())


class _Rate:
    """Tokens a second over the last ten."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def of(self, total: int) -> float:
        now = time.monotonic()
        if now - self._seen[-1][0] >= 0.5:
            self._seen.append((now, total))
        while len(self._seen) > 1 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (total - before) / (now - since) if now > since else 0.0


def _number(ticket: Ticket) -> int:
    assert ticket.task is not None
    return ticket.task.number
