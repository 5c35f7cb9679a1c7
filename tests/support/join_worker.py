"""A join worker as a process, until SIGTERM. See `join_run.JoinProcess`."""

from __future__ import annotations

import json
import os
import signal
import sys

from streamrft.schemas.topics import Topics
from streamrft.streams import faults
from streamrft.streams.log import Limits, open_log
from streamrft.streams.process import Process
from streamrft.streams.settings import StreamSettings
from streamrft.streams.worker import run_join


def pause_once_at(point: str) -> None:
    """Stop this process (SIGSTOP) the first time that it reaches the point."""
    usual, left = faults.reach, [point]

    def reach(name: str, step: int | None = None) -> None:
        if name in left:
            left.remove(name)
            os.kill(os.getpid(), signal.SIGSTOP)
        usual(name, step)

    faults.reach = reach


def main() -> None:
    told = json.loads(sys.argv[1])
    pause_once_at(told["pause_at"])
    log = open_log(told["url"], Limits(session_timeout_ms=told["session_ms"]))
    topics = Topics(told["namespace"], told["num_partitions"])
    process = Process(log, topics, name=told["name"], role="join")
    process.stop_on_signals()
    run_join(process, StreamSettings(**told["settings"]))
    process.ended()
    log.close()


if __name__ == "__main__":
    main()
