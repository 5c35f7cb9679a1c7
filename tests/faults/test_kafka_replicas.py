"""Three brokers of which two must have a record: one dies under load, and nothing is lost."""

from __future__ import annotations

import pytest
from chaos_run import Chaos
from kafka_broker import Cluster, needs_kafka_home

REPLICATED = {"replication": 3, "topic.min.insync.replicas": 2}
AWAY_S = 4.0


@pytest.fixture
def cluster(tmp_path):
    needs_kafka_home()
    with Cluster(tmp_path) as cluster:
        yield cluster


BESIDE = [pytest.param("faust", False, id="faust-beside")]
ALONE = [pytest.param(e, True, id=e, marks=pytest.mark.slow) for e in ("native", "faust")]


@pytest.mark.parametrize(("engine", "is_alone"), BESIDE + ALONE)
def test_a_leader_that_dies_under_load_loses_nothing_acknowledged(
    tmp_path, cluster, engine, is_alone
):
    changes = {"event_log": {"options": REPLICATED}}
    with Chaos(tmp_path / "run", cluster.url, 0, engine, changes, is_alone=is_alone) as chaos:
        crowd = chaos.crowd
        chaos.begin()
        crowd.pass_until(
            lambda: crowd.watch.total("groups") > 100, 180, lambda: "nothing is joined"
        )
        node = cluster.leader(chaos.place.topics.name("trajectories"))
        node.kill()
        crowd.mark("a leader")
        num_fed = crowd.watch.total("trajectories")
        crowd.pause(AWAY_S)
        node.start()
        chaos.finish()
        assert crowd.watch.total("trajectories") > num_fed
        assert chaos.demand() < chaos.resume_s
