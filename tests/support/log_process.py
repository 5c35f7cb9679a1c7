"""Processes on the log, and waits with deadlines, for tests of every adapter."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from streamrft.streams.log import Consumer, Record

DEADLINE_S = 120.0


class Worker:
    """A child that runs `log_worker.py`. Killed when the block ends."""

    def __init__(
        self, url: str, session_ms: int, *arguments: str, options: Mapping[str, str] | None = None
    ) -> None:
        script = Path(__file__).with_name("log_worker.py")
        limits = {"session_timeout_ms": session_ms, "options": dict(options or {})}
        self.process = subprocess.Popen(
            [sys.executable, script, url, json.dumps(limits), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)

    def hear(self, wanted: str, timeout_s: float = DEADLINE_S) -> Any:
        """The next thing said under that name; others before it are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                facts = json.loads(self._lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"nothing about {wanted!r} within {timeout_s} s") from None
            if wanted in facts:
                return facts[wanted]

    def heard_all(self) -> list[dict[str, Any]]:
        """What was said and not heard yet."""
        facts = []
        while not self._lines.empty():
            facts.append(json.loads(self._lines.get()))
        return facts

    def say(self) -> None:
        """Let the child go on to its next act."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


def wait_for(is_true: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
    """Call until true; an error at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.01)


def read(consumer: Consumer, num_records: int, timeout_s: float = DEADLINE_S) -> list[Record]:
    """At least that many records, polled; an error at the deadline."""
    records: list[Record] = []
    deadline = time.monotonic() + timeout_s
    while len(records) < num_records:
        assert time.monotonic() < deadline, f"{len(records)} of {num_records} in {timeout_s} s"
        records += consumer.poll(timeout_ms=100)
    return records
