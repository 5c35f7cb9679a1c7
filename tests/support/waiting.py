"""Waits with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(ready: Callable[[], object], what: str = "it", timeout_s: float = 60.0) -> None:
    """Look until it is so; an error that names `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
