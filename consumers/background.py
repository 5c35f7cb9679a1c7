"""A save that is written by a thread of its own while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from .manifest import Saved


class BackgroundSave:
    """writing -> whole | failed. What it writes was copied before, and it touches no log.

    Its thread is a daemon: a process that must end does not wait for a store that is away, and
    what was half written has no manifest.
    """

    def __init__(self, step: int, position: Mapping[str, Any], write: Callable[[], Saved]) -> None:
        """Begin; `position` is the source's at `step`, kept for whoever lands the save."""
        self.step, self.position, self._write = step, position, write
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"save of step {step}", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether `result` answers at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        return self._done.wait(timeout_s)

    def result(self) -> Saved:
        """What was saved, or the error that the thread ended with, raised here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def _run(self) -> None:
        try:
            self._saved = self._write()
        except BaseException as error:  # the trainer's thread raises it
            self._error = error
        finally:
            self._done.set()
