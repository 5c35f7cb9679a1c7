"""The Faust application of one join worker: in a thread of its own, or the process's main one."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ...schemas.errors import LogUnavailable
from .exchange import Exchange

if TYPE_CHECKING:
    import faust

logger = logging.getLogger("streamrft")

THREAD = "faust"
_START_S, _STOP_S = 60.0, 3.0
_LOOK_S, _RESTART_S = 0.5, 1.0

MakeApp = Callable[[Sequence[str], Exchange], "faust.App"]


class Membership(Protocol):
    """One worker's place in the group. Called in the worker's thread."""

    def start(self, topics: Sequence[str]) -> None:
        """Join the group, reading these topics."""
        ...

    def check(self) -> None:
        """See to it that Faust runs. Raises LogUnavailable while it does not."""
        ...

    def stop(self) -> None:
        """Leave the group."""
        ...


class HostedFaust:
    """Faust is the process and started us: `faust -A streamrft.streams.faust_app worker`."""

    def start(self, topics: Sequence[str]) -> None:
        """See `Membership.start`. It runs."""

    def check(self) -> None:
        """See `Membership.check`. When Faust ends, so do we."""

    def stop(self) -> None:
        """See `Membership.stop`. Faust stops by itself."""


class EmbeddedFaust:
    """Faust in a thread with an event loop of its own, started again when it ends by itself.

    stopped -> running <-> ended (its error is kept) -> stopped
    """

    def __init__(self, make_app: MakeApp, exchange: Exchange) -> None:
        self._make_app, self._exchange = make_app, exchange
        self._topics: Sequence[str] = ()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._restart_at = 0.0

    def start(self, topics: Sequence[str]) -> None:
        """See `Membership.start`."""
        self._topics, self._failure = topics, None
        self._thread = threading.Thread(target=self._main, name=THREAD, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See `Membership.check`. One that ended by itself is started again after a second."""
        if self._thread is None or self._thread.is_alive():
            return
        now = time.monotonic()
        if not self._restart_at:
            self._restart_at = now + _RESTART_S
        if now < self._restart_at:
            raise LogUnavailable(f"Faust ended: {self._failure!r}")
        self._restart_at = 0.0
        self.start(self._topics)

    def stop(self) -> None:
        """See `Membership.stop`."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S + 0.5)
        if self._thread.is_alive():
            logger.warning("Faust did not end within %.0f s and is left behind", _STOP_S)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # whatever ends Faust is said, and it is started again
            self._failure = error
            logger.warning("Faust ended: %r", error)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = self._make_app(self._topics, self._exchange)
        # without a share of the partitions, or without a broker, it starts for long
        starting = asyncio.ensure_future(app.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, timeout=_START_S, return_when=FIRST_COMPLETED)
            if starting.done():
                starting.result()
            elif not stopping.done():
                raise TimeoutError(f"it did not start within {_START_S:g} s")
            while not self._stopping.is_set():
                if app.crashed or app.should_stop:
                    raise app.crash_reason or RuntimeError("it stopped")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _LOOK_S)
        finally:
            self._exchange.assign(())
            starting.cancel()
            stopping.cancel()
            await _stopped(app)


async def _stopped(app: faust.App) -> None:
    try:
        await asyncio.wait_for(app.stop(), _STOP_S)
    except Exception as error:  # it must not hide what ended Faust
        logger.warning("Faust did not stop in order within %g s: %r", _STOP_S, error)
