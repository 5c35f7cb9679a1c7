"""A feed into a crowd of join workers of which some come, go and die; what is demanded of both."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from chaos_check import check
from chaos_feed import Feed, Feeder
from chaos_join import Crowd, Place, num_read, plan_of
from kafka_broker import Broker
from small_run import merge

# what is demanded of a machine that does nothing else; of one that does, so many times as much
RESUME_S, LEAVE_S, BUSY_TIMES = 15.0, 10.0, 4
DRAIN_S, FEED_S, STILL_S = 180.0, 180.0, 2.0
RATE = 3_600
# the feed goes on for so long after the last change, and nowhere so long that it ends before
LAST_S, LONGEST_S = 3.0, 600.0
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
        *,
        is_alone: bool = True,
        feed_s: float = LONGEST_S,
    ) -> None:
        """A run that nothing was fed to yet.

        Args:
            folder: of this run alone.
            url: of the log.
            seed: what is fed, and who comes and goes when.
            engine: the workers' shell.
            changes: to the configuration.
            is_alone: nothing else runs on this machine, so what is late is late by itself.
            feed_s: when the feed ends if nobody ends it.
        """
        self.is_alone = is_alone
        folder.mkdir()
        name = {"name": f"chaos-{secrets.token_hex(4)}", "event_log": {"options": SESSION}}
        self.rng = random.Random(seed)
        self.place = Place(folder, url, merge(name, changes or {}))
        self.changes = plan_of(self.rng)
        self.pauses = [self.rng.uniform(0.7, 1.7) for _ in self.changes]
        feed = Feed(url, self.place.topics.namespace, seed, feed_s, RATE)
        self.feeder = Feeder(feed, folder)
        self.crowd = Crowd(self.place, ["--engine", engine], self.rng)

    def run(self, broker: Broker | None = None) -> None:
        """Feed, change, kill the broker twice if one is given, and wait until all is joined."""
        outages = self.rng.sample(range(1, len(self.changes)), 2) if broker else []
        self.begin()
        for i, (change, pause) in enumerate(zip(self.changes, self.pauses, strict=True)):
            self.crowd.pause(pause)
            if broker is not None and i in outages:
                self.crowd.has_outages = True
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
        """Feed a little more, until everything is joined and every worker has ended."""
        self.crowd.pause(LAST_S)
        self.feeder.end()
        self.await_joined()
        self.crowd.end_all()

    def await_joined(self, within_s: float = DRAIN_S) -> None:
        """Until all is fed and read, every group closed and nothing moves; if it comes to that.

        What is missing is named by `demand`.
        """
        self.crowd.pass_until(lambda: self.feeder.is_done, FEED_S, lambda: "the feed does not end")
        watch, deadline = self.crowd.watch, time.monotonic() + within_s
        while time.monotonic() < deadline:
            self.crowd.pause(0.5)
            is_open = watch.total("open_groups") + watch.total("early")
            num = self.said["records"] + watch.total("forwarded")
            if num_read(watch.totals()) >= num and not is_open and watch.still_s() > STILL_S:
                return

    @cached_property
    def said(self) -> dict[str, float]:
        """What the feeder said at its end."""
        return self.feeder.said()

    @property
    def rate(self) -> float:
        """Events a second that the feed had while groups began."""
        return self.said["sent"] / self.said["seconds"]

    @property
    def resume_s(self) -> float:
        """How soon after a kill something must be joined."""
        return RESUME_S * (1 if self.is_alone else BUSY_TIMES)

    def demand(self) -> float:
        """Everything that must hold at the end; the longest wait after a kill, in seconds."""
        watch = self.crowd.watch
        waits_s = watch.waits_s([at for _, at in self.crowd.kills])
        waits = [(name, s) for (name, _), s in zip(self.crowd.kills, waits_s, strict=True)]
        print({**self.said, "waits after kills": waits, "slowest end": max(self.crowd.ends_s)})
        check(self.place, self.said, watch.totals())
        status = self.place.status()
        assert status.returncode == 0, status.stdout + status.stderr
        times = 1 if self.is_alone else BUSY_TIMES
        assert max(self.crowd.ends_s) < LEAVE_S * times, f"ends took {self.crowd.ends_s} s"
        return max(waits_s, default=0.0)

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self.crowd.close()
        self.feeder.close()
        self.place.log.close()
