"""Symbolic equality by math_verify in a child process, so that a hard expression can be stopped.

math_verify bounds its work by SIGALRM, which only a main thread may use: the child has one.
"""

from __future__ import annotations

import importlib.util
import json
import selectors
import subprocess
import sys
import threading

from ...schemas.errors import MissingExtra, Timeout

_START_TIMEOUT_S = 120.0
_TIMEOUT_S = 20.0


class MathVerifier:
    """One child for all threads. absent -> running -> killed (time-out) -> absent."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def is_equal(self, truth: str, answer: str) -> bool:
        """Whether both mean the same; False when one of them cannot be parsed.

        Raises:
            MissingExtra: math_verify is not installed.
            Timeout: the child was killed; the next call starts another.
        """
        with self._lock:
            child, timeout_s = self._running()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([truth, answer]).encode() + b"\n")
            child.stdin.flush()
            with selectors.DefaultSelector() as ready:
                ready.register(child.stdout, selectors.EVENT_READ)
                line = child.stdout.readline() if ready.select(timeout_s) else b""
            if not line:
                self._kill()
                raise Timeout(
                    f"math_verify on {answer[:80]!r} against {truth[:80]!r}",
                    round(timeout_s * 1000),
                    "The rollout is failed; a reward_fn of your own may bound its work otherwise.",
                )
            return bool(json.loads(line))

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._kill()

    def _running(self) -> tuple[subprocess.Popen[bytes], float]:
        if self._child is not None and self._child.poll() is None:
            return self._child, self._timeout_s
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math_verify", "train")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "streamrft.producers.rewards.verify_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._child, _START_TIMEOUT_S

    def _kill(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._child = None


VERIFIER = MathVerifier()
