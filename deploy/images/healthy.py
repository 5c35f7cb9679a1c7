"""Whether this container's process works: its heartbeats are on the log, and the last one is young.

A process writes one every two seconds whatever it does or waits for, so one check sees the process,
its network and the broker. `python -m streamrft.deploy.images.healthy --config ... --stage ...`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterable

from ...schemas import codec
from ...schemas.errors import StreamrftError
from ...schemas.events import Event, Heartbeat, now_ms
from ...streams.log import Log, Partition
from ...streams.reading import read_to_end
from ..plan import Stage, plan

MAX_AGE_S = 60.0


def newest_beat(events: Iterable[Event], host: str) -> Heartbeat | None:
    """The last heartbeat that a process of `host` wrote."""
    beats = [e for e in events if isinstance(e, Heartbeat) and e.host == host]
    return max(beats, key=lambda beat: beat.produced_at, default=None)


def complaint(log: Log, stage: Stage, host: str) -> str:
    """What is wrong with the process of `host`; empty when nothing is."""
    topic = Partition(stage.topics.name("heartbeats"), 0)
    since_ms = now_ms() - int(MAX_AGE_S * 1000)
    records = read_to_end(log, log.offsets_at([topic], since_ms))
    beat = newest_beat((codec.decode(r.value or b"", Heartbeat) for r in records), host)
    if beat is None:
        return f"no heartbeat of {host} on {topic.topic} within {MAX_AGE_S:g} s"
    return f"{beat.process} ended" if beat.state == "ended" else ""


def main() -> int:
    """0: healthy. 1: not, and why on standard error."""
    parser = argparse.ArgumentParser(description="Exit 0 when this host's process is alive.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage")
    arguments = parser.parse_args()
    try:
        run = plan(arguments.config)
        stage, log = run.stage(arguments.stage), run.open_log()
        try:
            found = complaint(log, stage, socket.gethostname())
        finally:
            log.close()
    except StreamrftError as error:
        found = str(error)
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
