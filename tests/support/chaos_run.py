"""A feed into a crowd of join workers of which some come, go and die; what is demanded of both."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos_check import check
from chaos_feed import Feed, Feeder
from chaos_join import Crowd, Place, plan_of
from kafka_broker import Broker
from small_run import merge

RESUME_S, DRAIN_S, FEED_S, STILL_S = 15.0, 60.0, 180.0, 2.0
# the feed goes on for so long after the last change
LAST_S = 3.0
SESSION = {"session_timeout_ms": 6_000}


class Chaos:
    """A run of join workers of one engine, its feeder, and ten changes of who is alive."""

    def __init__(
        self,
        folder: Path,
        url: str,
        seed: int,
        engine: str,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """`changes`: to the configuration."""
        folder.mkdir()
        name = {"name": f"chaos-{secrets.token_hex(4)}", "event_log": {"options": SESSION}}
        self.rng = random.Random(seed)
        self.place = Place(folder, url, merge(name, changes or {}))
        self.changes = plan_of(self.rng)
        self.pauses = [self.rng.uniform(0.7, 1.7) for _ in self.changes]
        feed = Feed(url, self.place.topics.namespace, seed, sum(self.pauses) + LAST_S)
        self.feeder = Feeder(feed, folder)
        self.crowd = Crowd(self.place, ["--engine", engine], self.rng)

    def run(self, broker: Broker | None = None) -> None:
        """Feed, change, kill the broker twice if one is given, and wait until all is joined."""
        outages = self.rng.sample(range(1, len(self.changes)), 2) if broker else []
        self.begin()
        for i, (change, pause) in enumerate(zip(self.changes, self.pauses, strict=True)):
            self.crowd.pause(pause)
            if broker is not None and i in outages:
                broker.kill()
                self.crowd.pause(self.rng.uniform(0, 2))
                broker.start()
                self.crowd.broker_is_back()
            getattr(self.crowd, change)()
        self.finish()

    def begin(self) -> None:
        """Two workers and the feed."""
        for _ in range(2):
            self.crowd.start()
        self.feeder.await_ready()
        self.feeder.begin()

    def finish(self) -> None:
        """Until everything is fed and joined and every worker has ended."""
        self.crowd.pass_until(lambda: self.feeder.is_done, FEED_S, lambda: "the feed does not end")
        self.said = self.feeder.said()
        self._drain()
        self.crowd.end_all()

    def _drain(self) -> None:
        """Until every group is closed and nothing moves; what is missing is named by `check`."""
        watch, deadline = self.crowd.watch, time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            self.crowd.pause(0.5)
            is_open = watch.total("open_groups") + watch.total("early")
            if not is_open and watch.still_s() > STILL_S:
                return

    @property
    def rate(self) -> float:
        """Events a second that the feed had."""
        return self.said["sent"] / self.said["seconds"]

    def demand(self) -> None:
        """Everything that must hold at the end."""
        watch = self.crowd.watch
        resumed = {f"{name} killed": watch.resumed_s(at) for name, at in self.crowd.kills}
        print({**self.said, **resumed, "slowest end": max(self.crowd.ends_s)})
        check(self.place, self.said, watch.totals())
        status = self.place.status()
        assert status.returncode == 0, status.stdout + status.stderr
        assert all(s is not None and s < RESUME_S for s in resumed.values()), resumed

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self.crowd.close()
        self.feeder.close()
        self.place.log.close()
