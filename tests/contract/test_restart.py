"""A restarted join worker reads the state of its open groups: what that costs, what it holds."""

import time

import pytest
from join_run import JoinRun
from join_scripts import scored
from open_groups import GROUP, NUM_WRITES, write_open_groups
from waiting import Standstill

from streamrft.schemas.events import now_ms
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
    """The least of two."""
    spent = []
    for _ in range(2):
        begin = time.process_time()
        call()
        spent.append(time.process_time() - begin)
    return min(spent)


def test_restoring_open_groups_costs_little_more_than_reading_their_topic(run):
    write_open_groups(run.log, run.topics, 5_000)
    joins = restored(run)
    assert sum(join.num_open for join in joins) == 5_000
    assert sum(join.num_pending for join in joins) == 5_000 * GROUP
    # a group is decoded and indexed once, however often it was written
    plain = max(cpu_s(lambda: plainly_read(run)), 4e-6 * 5_000 * NUM_WRITES)
    assert cpu_s(lambda: restored(run)) < 4 * plain


def test_reading_the_state_for_longer_than_a_session_keeps_the_partitions(
    place, monkeypatch, caplog
):
    """Tried again where the machine let a session pass in which this process could not breathe."""
    session_s = place.session_ms / 1000
    run = JoinRun(place.open(session_timeout_ms=place.session_ms), namespace=place.name("run"))
    write_open_groups(run.log, run.topics, 1)

    def slowly(log, starts):
        for record in read_to_end(log, starts):
            time.sleep(session_s / 4)
            yield record

    monkeypatch.setattr(outbox, "read_to_end", slowly)

    def is_kept(attempt: int) -> bool:
        caplog.clear()
        run.send(*[scored(f"fresh.{attempt}.{n}:0:a", 1.0, at=now_ms()) for n in range(8)])
        until = time.monotonic() + 1.5 * session_s
        run.drive(lambda: time.monotonic() > until and run.num("experiences") == 8 * attempt)
        return "given up" not in caplog.text

    for attempt in range(1, 9):
        with Standstill() as machine:
            kept = is_kept(attempt)
        if kept:
            return
        assert machine.longest_s > session_s / 3, caplog.text
    pytest.fail("the machine never let this process breathe for a session")
