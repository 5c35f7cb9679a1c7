"""No child outlives its supervisor, however that dies, and not even while it is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PARENT_VARIABLE = "STREAMRFT_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def before_exec() -> Callable[[], None] | None:
    """What a child does between fork and exec: ask the kernel for SIGKILL at its parent's death.

    None where the kernel offers no such thing; `die_with_parent` covers that.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def die_with_parent() -> None:
    """In a supervisor's child: end when standard input, a pipe that it holds open, is closed."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform == "linux":
        return
    threading.Thread(target=_watch, name="parent watcher", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
