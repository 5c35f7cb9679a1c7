"""Join workers that come, go and die at 3,000 events a second lose and double nothing."""

from __future__ import annotations

from typing import Any

import pytest
from chaos_run import Chaos
from kafka_broker import Broker, needs_kafka_home

MIN_RATE = 3_000
SEEDS = range(5)
ENGINES = ("native", "faust")
CLASSIC = {"event_log": {"options": {"group.protocol": "classic"}}}


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
def test_workers_that_come_go_and_die_lose_and_double_nothing(tmp_path, kafka_url, engine, seed):
    with Chaos(tmp_path / "run", kafka_url, seed, engine) as chaos:
        chaos.run()
        chaos.demand()
    assert chaos.rate > MIN_RATE, f"the feed had only {chaos.rate:,.0f} events a second"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_broker_that_dies_twice_beside_them_changes_nothing(tmp_path, broker, engine, seed):
    with Chaos(tmp_path / "run", broker.url, seed, engine) as chaos:
        chaos.run(broker)
        chaos.demand()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_holds_under_the_classic_protocol_of_groups(tmp_path, broker, seed):
    with Chaos(tmp_path / "run", broker.url, seed, "native", CLASSIC) as chaos:
        chaos.run(broker)
        chaos.demand()
