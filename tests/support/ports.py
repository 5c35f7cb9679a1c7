"""Ports for servers that are started a while after they were chosen, or again on the same one."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that connections of other tests are given."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
