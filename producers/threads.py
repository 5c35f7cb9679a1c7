"""Threads that an event loop waits for and the end of the process does not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Pool:
    """Daemon threads, started when all others are busy, at most `max_threads`."""

    def __init__(self, max_threads: int) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._left = max_threads

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` in one of them; a cancelled wait leaves it running."""
        job = _job(function, args)
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False) and self._left:
            self._left -= 1
            threading.Thread(target=self._body, daemon=True).start()
        return await job[1]

    def _body(self) -> None:
        while True:
            _do(self._jobs.get())
            self._idle.release()


_POOL = Pool(64)


async def in_thread(function: Callable[..., R], *args: Any) -> R:
    """Call what may block, in a thread that the end of the process does not wait for."""
    return await _POOL.call(function, *args)


class Worker:
    """One daemon thread that does calls in order, and owns what they own."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` there, after what was asked for before."""
        job = _job(function, args)
        self._jobs.put(job)
        return await job[1]

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` there, and let nobody wait; it must not raise."""
        self._jobs.put(function)

    def stop(self, timeout_s: float) -> None:
        """End after the call that runs now; waits for it at most so long."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _body(self) -> None:
        while (job := self._jobs.get()) is not None:
            if callable(job):
                job()
            else:
                _do(job)


def _job(function: Callable[..., Any], args: tuple[Any, ...]) -> _Job:
    loop = asyncio.get_running_loop()
    return loop, loop.create_future(), lambda: function(*args)


def _do(job: _Job) -> None:
    loop, future, call = job
    if future.cancelled():
        return
    try:
        result, error = call(), None
    except BaseException as raised:
        result, error = None, _bearable(raised)
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        return  # the loop was closed: nobody waits any more


def _bearable(error: BaseException) -> Exception:
    """What a future takes: a SystemExit would end the loop that waits, a StopIteration hang it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
