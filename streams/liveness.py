"""Whether a process that left its name behind still lives, on this machine."""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import NamedTuple

import psutil

_CLOCK_STEP_S = 2.0


class Identity(NamedTuple):
    """A process for ever: its number is given anew after its death, its start is not.

    `place` is where `pid` has a meaning: the machine, and on Linux the namespace of numbers.
    """

    place: str
    pid: int
    started: float


def this_process() -> Identity:
    """The identity of the calling process."""
    return _identity(os.getpid())


@cache
def _identity(pid: int) -> Identity:
    return Identity(_place(), pid, psutil.Process(pid).create_time())


@cache
def _place() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""  # no Linux: one namespace a machine
    return f"{socket.gethostname()}/{namespace}"


def is_dead(identity: Identity) -> bool:
    """Whether the process has certainly ended. False for one elsewhere: nobody can tell."""
    if identity.place != _place():
        return False
    try:
        process = psutil.Process(identity.pid)
        if abs(process.create_time() - identity.started) > _CLOCK_STEP_S:
            return True
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False  # another user's, so it is there
