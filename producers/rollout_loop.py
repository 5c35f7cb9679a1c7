"""The thread in which groups are rolled out at the same time, apart from the thread of the log."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .engines.service import EngineService
from .progress import Ticket
from .rollouts import GroupRunner, Rolled

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What came of one ticket: records, what the process must end with, or neither (cancelled)."""

    ticket: Ticket
    rolled: Rolled | None
    error: BaseException | None = None


class RolloutLoop:
    """Runs groups in an event loop of its own. running -> stopped."""

    def __init__(self, runner: GroupRunner, service: EngineService) -> None:
        self._runner, self._service = runner, service
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Ticket, asyncio.Task[Rolled]] = {}
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self._thread = threading.Thread(target=self._body, name="rollouts", daemon=True)
        self._thread.start()

    def start(self, tickets: Sequence[tuple[Ticket, int]]) -> None:
        """Roll these out, each under weights of at least its version; from any thread.

        Groups that start together are generated together.
        """
        self._loop.call_soon_threadsafe(self._start, tickets)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Stop these; their outcomes are empty. From any thread."""
        self._loop.call_soon_threadsafe(self._cancel, tickets)

    def stop(self) -> None:
        """Cancel everything and end the thread. What is not done stays unacknowledged."""
        self._service.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)

    def _body(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _start(self, tickets: Sequence[tuple[Ticket, int]]) -> None:
        self._service.num_active += len(tickets)
        for ticket, min_version in tickets:
            assert ticket.task is not None
            task = self._loop.create_task(self._runner.run(ticket.task, min_version))
            self._tasks[ticket] = task
            task.add_done_callback(partial(self._ended, ticket))

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if task := self._tasks.get(ticket):
                task.cancel()

    def _ended(self, ticket: Ticket, task: asyncio.Task[Rolled]) -> None:
        del self._tasks[ticket]
        self._service.num_active -= 1
        if task.cancelled():
            self.outcomes.put(Outcome(ticket, None))
        elif (error := task.exception()) is not None:
            self.outcomes.put(Outcome(ticket, None, error))
        else:
            self.outcomes.put(Outcome(ticket, task.result()))
        self._service.look()
