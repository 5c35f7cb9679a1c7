"""The trainer's lease, renewed by a thread of its own while a long step runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ..schemas.errors import Fenced, LogError
from ..streams.log import Lease
from ..streams.process import Process, until_answered

logger = logging.getLogger("streamrft")


class LeaseKeeper:
    """held (renewed every third of its time) -> lost (a successor took it) | released.

    The guard is the fenced producer; the keeper lets the trainer stop earlier than at its next
    write. Its thread has its own connection, because a Log belongs to one thread.
    """

    def __init__(self, process: Process, lease: Lease) -> None:
        """Keep a lease that was just acquired from `process.log`."""
        self._process, self._log, self.lease = process, process.log, lease
        self._done = threading.Event()
        self._is_busy = False
        self._lost: Fenced | None = None
        self._thread = threading.Thread(target=self._renew, name=f"{lease.role} lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise Fenced when the lease is known to be lost. Cheap."""
        if self._lost is not None:
            raise self._lost

    def prove(self) -> None:
        """Ask the log itself, waiting for its answer; for the owner's thread.

        Raises:
            Fenced: a successor holds the role. LogUnavailable: no answer came within 5 minutes.
        """
        self.check()
        with self.waiting():
            until_answered(lambda: self._log.renew(self.lease), self.say)

    def prove_apart(self) -> None:
        """As `prove`, from another thread than the owner's: over a connection of its own, once."""
        self.check()
        log = self._log.reopen()
        try:
            log.renew(self.lease)
        finally:
            log.close()

    @property
    def is_stopping(self) -> bool:
        """Whether the process was asked to stop."""
        return self._process.is_stopping

    def say(self, waiting_for: str) -> None:
        """What the owner's thread waits for, for others to read; raises Fenced as `check`."""
        self.check()
        self._process.idle(waiting_for)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The owner's thread waits inside `working`, and says itself for what."""
        was_busy, self._is_busy = self._is_busy, False
        try:
            yield
        finally:
            self._is_busy = was_busy

    @contextmanager
    def working(self) -> Iterator[None]:
        """The owner's thread works inside and cannot say so itself: the keeper does."""
        self._process.alive()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def __enter__(self) -> LeaseKeeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join(timeout=self.lease.ttl_ms / 1000)
        self._log.release(self.lease)

    def _renew(self) -> None:
        log = self._log.reopen()
        speaker = Process(
            log, self._process.topics, name=self._process.name, role=self._process.role
        )
        last_said = 0.0
        try:
            while not self._done.wait(self.lease.ttl_ms / 3000):
                try:
                    log.renew(self.lease)
                    if self._is_busy:
                        speaker.alive(dict(self._process.metrics))
                except Fenced as error:
                    self._lost = error
                    return
                except LogError as error:
                    if time.monotonic() - last_said > 30:
                        logger.warning("lease %s is not renewed: %s", self.lease.role, error)
                        last_said = time.monotonic()
        finally:
            log.close()
