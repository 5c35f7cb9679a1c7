"""Join workers that come, go and die at 3,000 events a second lose and double nothing."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_check import check
from chaos_feed import Feed, Feeder
from chaos_join import Crowd, Place, plan_of
from kafka_broker import Broker, needs_kafka_home

RESUME_S, DRAIN_S, FEED_S = 15.0, 60.0, 180.0
# the feed goes on for so long after the last change
LAST_S = 3.0
MIN_RATE = 3_000
SEEDS = range(5)
ENGINES = ("native", "faust")


class Chaos:
    """One feed into one crowd of workers, and what is demanded of both."""

    def __init__(self, folder: Path, url: str, seed: int, options: list[str], **changes: Any):
        folder.mkdir()
        self.rng = random.Random(seed)
        self.place = Place(folder, url, changes)
        self.changes = plan_of(self.rng)
        self.pauses = [self.rng.uniform(0.7, 1.7) for _ in self.changes]
        feed = Feed(url, self.place.topics.namespace, seed, sum(self.pauses) + LAST_S)
        self.feeder = Feeder(feed, folder)
        self.crowd = Crowd(self.place, options, self.rng)

    def run(self, broker: Broker | None = None) -> None:
        """Feed, change, kill and wait until everything is joined."""
        outages = self.rng.sample(range(1, len(self.changes)), 2) if broker else []
        for _ in range(2):
            self.crowd.start()
        self.feeder.await_ready()
        self.feeder.begin()
        for i, (change, pause) in enumerate(zip(self.changes, self.pauses, strict=True)):
            self.crowd.pause(pause)
            if broker is not None and i in outages:
                broker.kill()
                self.crowd.pause(self.rng.uniform(0, 2))
                broker.start()
                self.crowd.broker_is_back()
            getattr(self.crowd, change)()
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
            if not is_open and watch.still_s() > 2.0:
                return

    def demand(self) -> None:
        """Everything that must hold at the end."""
        watch = self.crowd.watch
        check(self.place, self.said, watch.totals())
        status = self.place.status()
        assert status.returncode == 0, status.stdout + status.stderr
        resumed = {f"{name} killed": watch.resumed_s(at) for name, at in self.crowd.kills}
        print({**self.said, **resumed, "slowest end": max(self.crowd.ends_s)})
        assert all(s is not None and s < RESUME_S for s in resumed.values()), resumed

    def close(self) -> None:
        self.crowd.close()
        self.feeder.close()
        self.place.log.close()


@pytest.fixture
def chaos(tmp_path):
    made: list[Chaos] = []

    def make(url: str, seed: int, options: list[str], **changes: Any) -> Chaos:
        folder = tmp_path / f"chaos-{secrets.token_hex(4)}"
        made.append(Chaos(folder, url, seed, options, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def broker(tmp_path):
    """A broker of this test alone, which it may kill."""
    needs_kafka_home()
    broker = Broker(tmp_path / "broker").start()
    yield broker
    broker.stop()


def seeds(num_quick: int) -> list[Any]:
    """All seeds, the later ones marked slow."""
    slow = pytest.mark.slow
    return [pytest.param(s, marks=() if s < num_quick else slow) for s in SEEDS]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("engine", ENGINES)
def test_workers_that_come_go_and_die_lose_and_double_nothing(kafka_url, chaos, engine, seed):
    run = chaos(kafka_url, seed, ["--engine", engine])
    run.run()
    assert run.said["sent"] / run.said["seconds"] > MIN_RATE, run.said
    run.demand()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_broker_that_dies_twice_beside_them_changes_nothing(broker, chaos, engine, seed):
    run = chaos(broker.url, seed, ["--engine", engine])
    run.run(broker)
    run.demand()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_holds_under_the_classic_protocol_of_groups(broker, chaos, seed):
    classic = {"options": {"group.protocol": "classic"}}
    run = chaos(broker.url, seed, ["--engine", "native"], event_log=classic)
    run.run(broker)
    run.demand()
