"""A join worker that comes back to 100,000 open groups, each written four times."""

from __future__ import annotations

import secrets
import signal
import time
from functools import partial

import pytest
from join_run import JoinRun
from join_scripts import rew, scored
from open_groups import GROUP, member_id, write_open_groups
from waiting import until

from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams.log import open_log

PARTITIONS = range(4)


@pytest.fixture(params=["sqlite", "kafka"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/log.db"
    return request.getfixturevalue("kafka_url")


@pytest.fixture
def run(url):
    log = open_log(url)
    yield JoinRun(log, namespace=f"restart-{secrets.token_hex(4)}")
    log.close()


def _has(run, topic: str, num: int) -> bool:
    return run.num(topic) == num


def _has_read(run, num_rewards: int) -> bool:
    return run.counters().get("rewards") == num_rewards


@pytest.mark.slow
def test_worker_with_100_000_open_groups_is_at_work_within_a_minute(url, run):
    num = 100_000
    size = write_open_groups(run.log, run.topics, num)
    engines = ("native", "faust") if url.startswith("kafka") else ("native",)
    for i, engine in enumerate(engines, start=1):
        fresh = [scored(f"{engine}.{n}:0:a", 1.0, at=now_ms()) for n in range(40)]
        assert {partition_for(t.group_id.encode(), 4) for t in fresh} == set(PARTITIONS)
        known, missing = rew(member_id(i, 0), at=1), rew(member_id(i, 4), at=1)
        num_fresh, num_rewards = i * len(fresh), 2 * i
        run.send(*fresh, known, missing)
        begin = time.monotonic()
        with run.spawn(url, settings={"engine": engine}) as worker:
            until(partial(_has, run, "experiences", num_fresh))
            took_s = time.monotonic() - begin
            until(partial(_has_read, run, num_rewards))
            resident = worker.resident_bytes
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
        counters = run.counters()
        assert (counters["duplicate"], counters["applied"]) == (i, i)
        assert (counters["open_groups"], counters["pending"]) == (num, num * GROUP)
        print(f"{engine}: {took_s:.1f} s for {size:,} bytes of states; {resident:,} resident")
        assert resident < 1.5e9
