"""Processes of one stage: started, watched, restarted with back-off, ended in order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..schemas.errors import StreamrftError
from .parent import PARENT_VARIABLE, before_exec
from .plan import ProcessSpec, Run, Stage

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 30.0
MAX_SAME_FAILURES = 4
MAX_FAILURES = 10
_TAIL_BYTES = 16_384


@dataclass
class Child:
    """waiting (to be started at `start_at`) -> running -> waiting | done | stopped."""

    spec: ProcessSpec
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0
    is_done: bool = False
    is_stopped: bool = False
    num_restarts: int = 0
    failures: list[str] = field(default_factory=list)
    _log_start: int = 0

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start it in a process group of its own, so that Ctrl-C reaches only the supervisor."""
        with self._opened_log() as out:
            self._log_start = out.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
                preexec_fn=before_exec(),
            )

    def _opened_log(self) -> BinaryIO:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            return self.log_path.open("ab")
        except OSError as error:
            raise StreamrftError(f"{self.log_path}: cannot be written: {error.strerror}") from error

    def ended(self) -> int | None:
        """Exit code, once: negative for a signal. None while it runs or waits."""
        if self.process is None:
            return None
        code = self.process.poll()
        if code is not None:
            self._forget_process()
        return code

    def restart_later(self, code: int) -> bool:
        """Plan the next start; False when it failed too often to go on."""
        self.failures.append(self.cause(code))
        same = 0
        for failure in reversed(self.failures):
            if failure != self.failures[-1]:
                break
            same += 1
        if same >= MAX_SAME_FAILURES or len(self.failures) >= MAX_FAILURES:
            return False
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (len(self.failures) - 1), LAST_BACKOFF_S)
        self.start_at = time.monotonic() + backoff_s
        self.num_restarts += 1
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal when it still runs. A stopped process must go on to see SIGTERM."""
        if self.process is not None and self.is_running:
            self.process.send_signal(number)
            if number == signal.SIGTERM:
                self.process.send_signal(signal.SIGCONT)

    def last_lines(self, num_lines: int = 15) -> list[str]:
        """Last lines that it wrote since its last start."""
        try:
            with self.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return list(deque(text.splitlines(), num_lines))

    def last_error(self) -> str:
        """Its last line: what it died of, mostly."""
        lines = [line for line in self.last_lines() if line.strip()]
        if lines:
            return lines[-1].strip()
        is_full = not shutil.disk_usage(self.log_path.parent).free
        return "it could not write why, the disk of its log is full" if is_full else "no word of it"

    def cause(self, code: int) -> str:
        """What it ended of: the signal, or its last line."""
        return describe(code) if code < 0 else f"{describe(code)}: {self.last_error()}"

    def _forget_process(self) -> None:
        assert self.process is not None
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def command_of(run: Run, stage: Stage, spec: ProcessSpec) -> list[str]:
    """The command line of a process; the same words work by hand, on any machine."""
    words = [sys.executable, "-m", "streamrft.deploy.cli", spec.command]
    words += ["--config", str(run.config_path), "--name", spec.name]
    if stage.name:
        words += ["--stage", stage.name]
    for folder in run.plugin_dirs:
        words += ["--plugin-dir", folder]
    return words


def environment_of(stage: Stage, spec: ProcessSpec) -> dict[str, str]:
    """One thread for numerical libraries unless configured: the same sums whatever the machine."""
    config = stage.config
    threads = {"train": config.trainer.num_threads, "explore": config.explorer.num_threads}
    environment = {
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        PARENT_VARIABLE: str(os.getpid()),
    }
    if num := threads.get(spec.command):
        environment["OMP_NUM_THREADS"] = str(num)
    return environment


def stop_in_order(
    children: list[Child], order: tuple[str, ...], grace_s: float, meanwhile: Callable[[], None]
) -> None:
    """SIGTERM to one kind after the other, then SIGKILL to what is left after `grace_s` each.

    `meanwhile` is called about twenty times a second.
    """
    for command in order:
        group = [c for c in children if c.spec.command == command and c.is_running]
        for child in group:
            child.is_stopped = True
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(c.is_running for c in group) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.05)
    kill_all(children)


def kill_all(children: list[Child]) -> None:
    """SIGKILL to every child, and wait for each."""
    for child in children:
        child.send(signal.SIGKILL)
    for child in children:
        if child.process is not None:
            child.is_stopped = True
            child.process.wait()
            child.ended()
