"""Join workers that come, go and die at 3,000 events a second lose and double nothing."""

from __future__ import annotations

import json
from pathlib import Path

import chaos_run
import pytest
from chaos_run import DRAIN_S, Chaos
from join_scripts import scored
from topic_events import append_events

from streamrft.schemas.events import now_ms

MIN_RATE, FEED_S = 3_000, 4.0
SEEDS = range(5)
ENGINES = ("native", "faust")
CLASSIC = {"event_log": {"options": {"group.protocol": "classic"}}}
# beside other tests one seed runs, with more time
BESIDE = [pytest.param(0, False, id="beside")]
ALONE = [pytest.param(seed, True, id=f"{seed}", marks=pytest.mark.slow) for seed in SEEDS]


@pytest.mark.parametrize(("seed", "is_alone"), BESIDE + ALONE)
@pytest.mark.parametrize("engine", ENGINES)
def test_workers_that_come_go_and_die_lose_and_double_nothing(
    tmp_path, kafka_url, engine, seed, is_alone
):
    with Chaos(tmp_path / "run", kafka_url, seed, engine, is_alone=is_alone) as chaos:
        chaos.run()
        assert chaos.demand() < chaos.resume_s
    assert chaos.rate > MIN_RATE or not is_alone, f"the feed had {chaos.rate:,.0f} events a second"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_broker_that_dies_twice_beside_them_changes_nothing(tmp_path, broker, engine, seed):
    with Chaos(tmp_path / "run", broker.url, seed, engine) as chaos:
        chaos.run(broker)
        assert chaos.demand() < chaos.resume_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_holds_under_the_classic_protocol_of_groups(tmp_path, broker, seed):
    with Chaos(tmp_path / "run", broker.url, seed, "native", CLASSIC) as chaos:
        chaos.run(broker)
        assert chaos.demand() < chaos.resume_s


class Skips:
    """A run whose Faust skips records in the middle of the feed, or at an idle end, or both."""

    def __init__(self, chaos: Chaos, *, positions: bool, middle: int = 0, end: str = "") -> None:
        told = {"positions": positions, "middle": middle, "end": end}
        script = Path(chaos_run.__file__).with_name("faust_skips.py")
        chaos.crowd.program = (str(script), json.dumps(told))
        self.chaos, self.patience_s = chaos, DRAIN_S if positions else 4.0

    def run(self) -> None:
        """Feed, and once all that is joined, 20 groups that nothing comes after."""
        chaos = self.chaos
        chaos.begin()
        chaos.await_joined(self.patience_s)
        last = [scored(f"last.{n}:0:a", 1.0, at=now_ms(), number=10**6 + n) for n in range(20)]
        append_events(chaos.place.log, chaos.place.topics, "trajectories", *last)
        for name in ("trajectories", "records"):
            chaos.said[name] += len(last)
        chaos.crowd.pause(1.0)
        chaos.await_joined(self.patience_s)
        chaos.crowd.end_all()


def test_what_faust_skips_is_read_from_the_log(tmp_path, kafka_url):
    with Chaos(tmp_path / "run", kafka_url, 0, "faust", is_alone=False, feed_s=FEED_S) as chaos:
        Skips(chaos, positions=True, middle=200, end="last").run()
        assert chaos.demand() < chaos.resume_s
        said = [worker.path.read_text() for worker in chaos.crowd.started]
    assert any("begins to skip" in text for text in said)


MIDDLE = pytest.param({"middle": 200}, id="middle", marks=pytest.mark.slow)


@pytest.mark.parametrize("skipped", [MIDDLE, pytest.param({"end": "last"}, id="end")])
def test_without_positions_of_our_own_a_skip_of_faust_is_seen(tmp_path, kafka_url, skipped):
    with Chaos(tmp_path / "run", kafka_url, 0, "faust", is_alone=False, feed_s=FEED_S) as chaos:
        Skips(chaos, positions=False, **skipped).run()
        with pytest.raises(AssertionError, match="experiences missing"):
            chaos.demand()
