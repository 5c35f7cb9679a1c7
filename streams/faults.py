"""Named points at which a test may kill this process, so that crashes are data with coordinates.

`STREAMRFT_KILL_AT="<point>[@<step>]=<marker file>"` kills the process with SIGKILL the first time
that it reaches the point (at that step); the marker file, created first, makes it happen once
whatever restarts. Commas part several. Without the variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal


def reach(point: str, step: int | None = None) -> None:
    """Die here if a test asked for it. Points: see tests/faults/."""
    wanted = os.environ.get("STREAMRFT_KILL_AT")
    if not wanted:
        return
    for kill in wanted.split(","):
        where, _, marker = kill.partition("=")
        name, _, at_step = where.partition("@")
        if name == point and (not at_step or int(at_step) == step):
            _die_once(marker)


def _die_once(marker: str) -> None:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
