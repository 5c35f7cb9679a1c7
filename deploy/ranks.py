"""The other ranks of a trainer on this machine: started with it, and gone with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .children import command_of
from .parent import PARENT_VARIABLE, before_exec
from .plan import ProcessSpec, Run, Stage

_END_S = 10.0


def is_follower() -> bool:
    """Whether torchrun, or rank 0 on this machine, started this process as a rank above 0."""
    return int(os.environ.get("RANK", "0")) > 0


def ignore_signals() -> None:
    """A rank above 0 ends when rank 0 says so or is gone, not in the middle of its step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def followers(run: Run, stage: Stage, name: str) -> Iterator[None]:
    """Start ranks 1 to trainer.num_ranks - 1 of a stage and become rank 0.

    Does nothing where torchrun started this process. They write to this process's output.
    """
    size = stage.config.trainer.num_ranks
    if size == 1 or "RANK" in os.environ:
        yield
        return
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size)}
    os.environ.update(own, RANK="0", LOCAL_RANK="0")
    started = [_start(run, stage, name, rank) for rank in range(1, size)]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for process in started:
            _end(process, _END_S if is_done else 0.0)


def _start(run: Run, stage: Stage, name: str, rank: int) -> subprocess.Popen[bytes]:
    number = str(rank)
    return subprocess.Popen(
        command_of(run, stage, ProcessSpec("train", f"{name}.rank-{number}")),
        stdin=subprocess.PIPE,
        env={**os.environ, "RANK": number, "LOCAL_RANK": number, PARENT_VARIABLE: str(os.getpid())},
        preexec_fn=before_exec(),
    )


def _end(process: subprocess.Popen[bytes], wait_s: float) -> None:
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
