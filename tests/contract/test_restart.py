"""A restarted join worker reads the state of its open groups: what that costs, what it holds."""

import signal
import time
from functools import partial

import pytest
from join_run import JoinRun, wait_for
from join_scripts import rew, scored
from open_groups import GROUP, NUM_WRITES, member_id, write_open_groups

from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams import outbox
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.outbox import read_state
from streamrft.streams.reading import begins, read_to_end
from streamrft.streams.settings import StreamSettings

PARTITIONS = range(4)


@pytest.fixture
def run(log, place) -> JoinRun:
    return JoinRun(log, namespace=place.name("run"))


def restored(run) -> list[RewardJoin]:
    joins = []
    for partition in PARTITIONS:
        state = read_state(run.log, run.topics, partition)
        join = RewardJoin(StreamSettings(), partition=partition, num_partitions=4)
        join.restore(state.groups, counts={}, time_ms=0)
        joins.append(join)
    return joins


def plainly_read(run) -> int:
    """As four restores read: a partition after the other."""
    starts = begins(run.log, run.topics.name("join_state"))
    return sum(1 for at, offset in starts.items() for _ in read_to_end(run.log, {at: offset}))


def cpu_s(call) -> float:
    """The least of three."""
    spent = []
    for _ in range(3):
        begin = time.process_time()
        call()
        spent.append(time.process_time() - begin)
    return min(spent)


def test_restoring_open_groups_costs_little_more_than_reading_their_topic(run):
    write_open_groups(run.log, run.topics, 5_000)
    joins = restored(run)
    assert sum(join.num_open for join in joins) == 5_000
    assert sum(join.num_pending for join in joins) == 5_000 * GROUP
    # a group is decoded and indexed once, however often it was written: 20 us beside 4 reads of 3
    plain = max(cpu_s(lambda: plainly_read(run)), 4e-6 * 5_000 * NUM_WRITES)
    assert cpu_s(lambda: restored(run)) < 6 * plain


def _has(run, topic: str, num: int) -> bool:
    return run.num(topic) == num


def _has_read(run, num_rewards: int) -> bool:
    return run.counters().get("rewards") == num_rewards


@pytest.mark.slow
def test_worker_with_100_000_open_groups_is_at_work_within_a_minute(place, run):
    num = 100_000
    size = write_open_groups(run.log, run.topics, num)
    engines = ("native", "faust") if place.url.startswith("kafka") else ("native",)
    for i, engine in enumerate(engines, start=1):
        fresh = [scored(f"{engine}.{n}:0:a", 1.0, at=now_ms()) for n in range(40)]
        assert {partition_for(t.group_id.encode(), 4) for t in fresh} == set(PARTITIONS)
        known, missing = rew(member_id(i, 0), at=1), rew(member_id(i, 4), at=1)
        num_fresh, num_rewards = i * len(fresh), 2 * i
        run.send(*fresh, known, missing)
        begin = time.monotonic()
        with run.spawn(place.url, settings={"engine": engine}) as worker:
            wait_for(partial(_has, run, "experiences", num_fresh), 60)
            took_s = time.monotonic() - begin
            wait_for(partial(_has_read, run, num_rewards))
            resident = worker.resident_bytes
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
        counters = run.counters()
        assert (counters["duplicate"], counters["applied"]) == (i, i)
        assert (counters["open_groups"], counters["pending"]) == (num, num * GROUP)
        print(f"{engine}: {took_s:.1f} s for {size:,} bytes of states; {resident:,} resident")
        assert resident < 1.5e9


def test_reading_the_state_for_longer_than_a_session_keeps_the_partitions(
    run, place, monkeypatch, caplog
):
    write_open_groups(run.log, run.topics, 1)

    def slowly(log, starts):
        for record in read_to_end(log, starts):
            time.sleep(place.session_ms / 1000 / 4)
            yield record

    monkeypatch.setattr(outbox, "read_to_end", slowly)
    run.send(*[scored(f"fresh.{n}:0:a", 1.0, at=now_ms()) for n in range(8)])
    until = time.monotonic() + 1.5 * place.session_ms / 1000
    run.drive(lambda: time.monotonic() > until and run.num("experiences") == 8)
    assert "given up" not in caplog.text
