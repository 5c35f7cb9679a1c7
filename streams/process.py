"""One process of a run as others see it: heartbeats, named waits, an orderly end on SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import psutil

from ..schemas import codec
from ..schemas.errors import LogUnavailable, Timeout
from ..schemas.events import Heartbeat, now_ms
from ..schemas.topics import Topics
from .log import Lease, Log

logger = logging.getLogger("streamrft")

BEAT_INTERVAL_S = 2.0
SAY_INTERVAL_S = 30.0
_BEAT_TIMEOUT_MS = 1_000
_LEASE_POLL_MS = 500
_RETRY_S = 0.5

T = TypeVar("T")


class Process:
    """Heartbeats and waits of one role. Owned by the thread that owns `log`.

    alive <-> idle (waiting for something, named) -> ended
    """

    def __init__(self, log: Log, topics: Topics, *, name: str, role: str) -> None:
        """`name` is unique in the run, such as explorer-0."""
        self.log, self.topics, self.name, self.role = log, topics, name, role
        self.metrics: dict[str, float] = {}
        self._producer = log.producer()
        self._stopping, self._is_heard = False, True
        self._last_beat = self._idle_since = self._last_said = 0.0
        self._blocker = ""
        self._me = psutil.Process()

    def stop_on_signals(self) -> None:
        """From now on SIGTERM and SIGINT set `is_stopping`; a second one ends at once."""

        def on_signal(number: int, frame: object) -> None:
            if self._stopping:
                os._exit(128 + number)
            self._stopping = True

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    @property
    def is_stopping(self) -> bool:
        """Whether the role should end, leaving everything acknowledged."""
        return self._stopping

    def stop(self) -> None:
        """Ask the role to end, from the same process."""
        self._stopping = True

    def alive(self, metrics: Mapping[str, float] | None = None) -> None:
        """Say that work goes on. Cheap: writes at most one heartbeat in 2 s."""
        self.metrics.update(metrics or {})
        self._blocker, self._idle_since = "", 0.0
        self._beat("alive")

    def idle(self, waiting_for: str) -> None:
        """Say what is waited for; logged every 30 s while it stays the same."""
        now = time.monotonic()
        if waiting_for != self._blocker:
            self._blocker, self._idle_since, self._last_said = waiting_for, now, now
        elif now - self._last_said >= SAY_INTERVAL_S:
            self._last_said = now
            logger.info("%s waits for %s (%.0f s)", self.name, waiting_for, now - self._idle_since)
        self._beat("idle")

    def wait_until(
        self, ready: Callable[[], bool], waiting_for: str, timeout_ms: int, advice: str = ""
    ) -> bool:
        """Call `ready` (which may block up to about a second) until it is true or the role stops.

        Returns False when the role was asked to stop. Raises Timeout at the deadline.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        while not ready():
            if self._stopping:
                return False
            if time.monotonic() > deadline:
                raise Timeout(f"{self.name}: {waiting_for}", timeout_ms, advice)
            self.idle(waiting_for)
        return True

    def acquire(self, role: str, ttl_ms: int, timeout_ms: int = 60_000) -> Lease | None:
        """A role of the run, such as trainer; None when asked to stop before it is free.

        Raises:
            Timeout: a living process holds it.
        """
        timeout_ms = max(timeout_ms, 3 * ttl_ms)
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._stopping:
            try:
                return self.log.acquire(
                    f"{self.topics.namespace}.{role}",
                    owner=self.name,
                    ttl_ms=ttl_ms,
                    timeout_ms=_LEASE_POLL_MS,
                )
            except Timeout as held:
                if time.monotonic() > deadline:
                    advice = "It ends with that process, or when it stops renewing."
                    raise Timeout(held.blocker, timeout_ms, advice) from None
                self.idle(held.blocker)
        return None

    def ended(self) -> None:
        """Say that this process ended on purpose, so that nobody takes it for dead."""
        self._beat("ended", force=True)

    def _beat(self, state: Literal["alive", "idle", "ended"], *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last_beat < BEAT_INTERVAL_S:
            return
        self._last_beat = now
        self.metrics["resident_bytes"] = float(self._me.memory_info().rss)
        beat = Heartbeat(
            process=self.name,
            role=self.role,
            state=state,
            waiting_for=self._blocker if state == "idle" else "",
            host=socket.gethostname(),
            pid=os.getpid(),
            metrics=self.metrics,
            produced_at=now_ms(),
        )
        self._producer.send(
            self.topics.name("heartbeats"), codec.encode(beat), key=self.name.encode()
        )
        try:
            self._producer.flush(_BEAT_TIMEOUT_MS)
        except LogUnavailable as error:  # a sign of life must not end a life
            if self._is_heard:
                logger.warning("%s: no heartbeat: %s", self.name, error)
            self._is_heard = False
            self._producer.close()
            self._producer = self.log.producer()
        else:
            self._is_heard = True


def until_answered(
    call: Callable[[], T], say: Callable[[str], None], timeout_s: float = 300.0
) -> T:
    """What `call` returns, which is repeated, and the wait said, while the log does not answer.

    Raises:
        LogUnavailable: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except LogUnavailable as error:
            if time.monotonic() > deadline:
                raise
            say(f"the log: {error}")
            time.sleep(_RETRY_S)
