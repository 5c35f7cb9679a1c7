"""Whether this container's process works: its heartbeats are on the log, and the last one is young.

A process writes one every two seconds whatever it does or waits for, so one check sees the process,
its network and the broker. `python -m streamrft.deploy.images.healthy --config ... --stage ...`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from contextlib import closing

from ...schemas.errors import StreamrftError
from ...schemas.events import Heartbeat, now_ms
from ...streams.log import Log, Partition
from ...streams.reading import event_in, read_to_end
from ..plan import Stage, plan

MAX_AGE_S = 60.0


def complaint(log: Log, stage: Stage, host: str) -> str:
    """What is wrong with the process of `host`; empty when nothing is."""
    place = Partition(stage.topics.name("heartbeats"), 0)
    since = log.offsets_at([place], now_ms() - int(MAX_AGE_S * 1000))
    beats = (event_in(record, Heartbeat) for record in read_to_end(log, since))
    own = [beat for beat in beats if beat is not None and beat.host == host]
    if not own:
        return f"no heartbeat of {host} on {place.topic} within {MAX_AGE_S:g} s"
    last = max(own, key=lambda beat: beat.produced_at)
    return f"{last.process} ended" if last.state == "ended" else ""


def main() -> int:
    """0: healthy. 1: not, and why on standard error."""
    parser = argparse.ArgumentParser(description="Exit 0 when this host's process is alive.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage")
    arguments = parser.parse_args()
    try:
        run = plan(arguments.config)
        stage = run.stage(arguments.stage)
        with closing(run.open_log()) as log:
            found = complaint(log, stage, socket.gethostname())
    except StreamrftError as error:
        found = str(error)
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
