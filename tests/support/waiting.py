"""Waits with a deadline, and what the machine did to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(ready: Callable[[], object], what: str = "it", timeout_s: float = 180.0) -> None:
    """Look until it is so; an error that names `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


class Standstill:
    """How long this process stood still at a time, because the machine was busy elsewhere.

    A promise that holds only for who is alive, as a session's, cannot be asked for after that.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        tick_s, before = 0.05, time.monotonic()
        while not self._done.wait(tick_s):
            now = time.monotonic()
            self.longest_s, before = max(self.longest_s, now - before - tick_s), now

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
