"""Consumer groups of the log: shares, hand-over, take-over and fencing, on every adapter."""

import time

import pytest
from log_process import read, wait_for

from streamrft.schemas.errors import Fenced, LogError, UnknownTopic
from streamrft.streams.log import Partition
from streamrft.streams.reading import read_to_end


def append(log, topic, num_records, *, num_partitions=4):
    producer = log.producer()
    for i in range(num_records):
        producer.send(topic, b"%d" % i, partition=i % num_partitions)
    producer.flush()
    producer.close()


def settle(*consumers):
    """Poll all until each partition has one reader and none is on the move."""
    seen = []

    def is_settled():
        for consumer in consumers:
            seen.extend(consumer.poll(timeout_ms=20))
        counts = [len(consumer.assignment()) for consumer in consumers]
        topics = {p.topic for consumer in consumers for p in consumer.assignment()}
        return sum(counts) == 4 * max(len(topics), 1) and max(counts) - min(counts) <= len(topics)

    wait_for(is_settled)
    return seen


@pytest.fixture
def group(place):
    return place.patient_group("group")


def test_sole_member_reads_everything_from_the_first_record(log, topic, group, partitions):
    append(log, topic, 8)
    consumer = log.consumer(group=group)
    consumer.subscribe([topic])
    assert len(read(consumer, 8)) == 8
    assert consumer.assignment() == partitions


def test_new_owner_starts_at_the_committed_positions(place, log, topic, group):
    append(log, topic, 8)
    first = log.consumer(group=group)
    first.subscribe([topic])
    read(first, 8)
    first.commit({p: 1 for p in first.assignment()})
    first.close()
    second = place.open().consumer(group=group)
    second.subscribe([topic])
    assert sorted(r.offset for r in read(second, 4)) == [1, 1, 1, 1]


def test_members_share_the_partitions_evenly_and_read_each_record_once(place, log, topic, group):
    consumers = [place.open().consumer(group=group) for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe([topic])
    settle(*consumers)
    assert not set(consumers[0].assignment()) & set(consumers[1].assignment())
    append(log, topic, 40)
    records = []
    wait_for(lambda: len(records_of(consumers, records)) >= 40)
    assert len({r.position for r in records}) == len(records) == 40


def records_of(consumers, records):
    for consumer in consumers:
        records += consumer.poll(timeout_ms=20)
    return records


def test_partition_p_of_all_topics_goes_to_one_member(place, log, group):
    topics = [place.create(log, name) for name in ("trajectories", "rewards", "clock")]
    consumers = [place.open().consumer(group=group) for _ in range(3)]
    for consumer in consumers:
        consumer.subscribe(topics)
    settle(*consumers)
    for consumer in consumers:
        numbers = {p.partition for p in consumer.assignment()}
        assert consumer.assignment() == sorted(Partition(t, n) for t in topics for n in numbers)
        assert numbers


def test_topics_with_different_numbers_of_partitions_are_refused(place, log, topic, group):
    other = place.create(log, "other", 3)
    with pytest.raises(LogError, match="different numbers of partitions"):
        log.consumer(group=group).subscribe([topic, other])
    with pytest.raises(UnknownTopic):
        log.consumer(group=group).subscribe(["nowhere"])


def test_more_members_than_partitions_leave_some_idle(place, log, group):
    topic = place.create(log, "narrow", 1)
    consumers = [place.open().consumer(group=group) for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe([topic])
    wait_for(lambda: sum(len(records_of([c], []) or c.assignment()) for c in consumers) == 1)
    append(log, topic, 3, num_partitions=1)
    records = []
    wait_for(lambda: len(records_of(consumers, records)) >= 3)
    assert [r.offset for r in records] == [0, 1, 2]
    assert sorted(len(c.assignment()) for c in consumers) == [0, 1]


def test_callbacks_run_inside_poll_with_what_comes_and_goes(place, topic, group, partitions):
    events = []
    first = place.open().consumer(group=group, member="first")
    first.subscribe(
        [topic],
        on_assign=lambda p: events.append(("assigned", sorted(p))),
        on_revoke=lambda p: events.append(("revoked", sorted(p))),
    )
    assert events == []
    wait_for(lambda: first.poll(timeout_ms=20) == [] and first.assignment() == partitions)
    assert events == [("assigned", partitions)]
    second = place.open().consumer(group=group, member="second")
    second.subscribe([topic])
    settle(first, second)
    revoked = sorted(p for what, ps in events if what == "revoked" for p in ps)
    assert set(second.assignment()) <= set(revoked)
    events.clear()
    kept = first.assignment()
    first.close()
    assert events == [("revoked", kept)]


def test_revoked_member_still_commits_in_its_callback(place, log, topic, group):
    append(log, topic, 8)
    first = place.open().consumer(group=group)
    first.subscribe(
        [topic],
        on_revoke=lambda ps: first.commit({p: first.positions()[p] for p in ps}),
    )
    read(first, 8)
    second = place.open().consumer(group=group)
    second.subscribe([topic])
    assert settle(first, second) == []
    assert all(second.positions()[p] == 2 for p in second.assignment())


def test_no_partition_has_two_readers_while_it_moves(place, log, group):
    topic = place.create(log, "six", 6)
    first, second, third = (place.open().consumer(group=group) for _ in range(3))
    first.subscribe([topic])
    second.subscribe([topic])
    wait_for(lambda: first.poll() == second.poll() == [] and len(second.assignment()) == 3)
    third.subscribe([topic])
    for _ in range(20):
        third.poll(timeout_ms=10)
        first.poll(timeout_ms=10)
        assert not set(second.assignment()) & set(third.assignment())
    second.commit(dict.fromkeys(second.assignment(), 0))
    consumers = (first, second, third)
    wait_for(lambda: [c.poll() for c in consumers] and len(third.assignment()) == 2)
    everyone = [Partition(topic, p) for p in range(6)]
    wait_for(
        lambda: (
            [c.poll() for c in consumers]
            and sorted(p for c in consumers for p in c.assignment()) == everyone
        )
    )


def test_member_commits_in_its_callback_when_it_closes(log, topic, group):
    append(log, topic, 8)
    consumer = log.consumer(group=group)
    consumer.subscribe([topic], on_revoke=lambda _: consumer.commit(consumer.positions()))
    read(consumer, 8)
    before = consumer.positions()
    consumer.close()
    consumer.close()
    assert log.consumer(group=group).committed(before) == before
    with pytest.raises(LogError, match="closed"):
        consumer.poll()


def test_member_that_closes_hands_over_at_once(place, topic, group, partitions):
    consumers = [place.open().consumer(group=group) for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe([topic])
    settle(*consumers)
    began = time.monotonic()
    consumers[0].close()
    wait_for(lambda: consumers[1].poll(20) == [] and consumers[1].assignment() == partitions)
    assert time.monotonic() - began < place.patient_ms / 1000, "its session had to end"


def test_commit_of_a_partition_that_was_handed_over_is_fenced(place, log, topic, group):
    append(log, topic, 8)
    first, second = (place.open().consumer(group=group) for _ in range(2))
    first.subscribe([topic])
    read(first, 8)
    before = first.positions()
    second.subscribe([topic])
    settle(first, second)
    with pytest.raises(Fenced, match="partition"):
        first.commit({p: before[p] for p in second.assignment()})
    first.commit({p: before[p] for p in first.assignment()})


def test_positions_of_a_lost_lease_abort_their_transaction(place, topic, group):
    log = place.open()
    append(log, topic, 8)
    out = place.create(log, "out")
    first, second = log.consumer(group=group), place.open().consumer(group=group)
    first.subscribe([topic])
    read(first, 8)
    before = first.positions()
    second.subscribe([topic])
    settle(first, second)
    producer = log.producer()
    with pytest.raises(Fenced):
        with producer.transaction():
            producer.send(out, b"v")
            producer.send_positions(first, before)
    outs = [Partition(out, p) for p in range(4)]
    assert list(read_to_end(log, dict.fromkeys(outs, 0))) == []
    assert second.committed(before) == {}


def test_seek_pause_and_resume_work_on_assigned_partitions(log, topic, group, partitions):
    append(log, topic, 8)
    consumer = log.consumer(group=group)
    consumer.subscribe([topic])
    read(consumer, 8)
    consumer.pause(partitions[:2])
    for partition in partitions:
        consumer.seek(partition, 0)
    assert {r.partition for r in read(consumer, 4)} == {2, 3}
    consumer.resume(partitions)
    assert {r.partition for r in read(consumer, 4)} == {0, 1}


def test_groups_read_independently(place, log, topic):
    append(log, topic, 4)
    for name in ("one", "two"):
        consumer = log.consumer(group=place.patient_group(name))
        consumer.subscribe([topic])
        assert len(read(consumer, 4)) == 4
        consumer.close()


def test_processes_share_a_group_and_a_killed_one_loses_its_share(place, log, topic):
    group = place.name("quick")
    with (
        place.worker("member", group, "a", topic) as a,
        place.worker("member", group, "b", topic) as b,
    ):
        wait_for(lambda: is_shared(a, b, log, topic))
        a.kill()
        b.heard_all()
        append(log, topic, 8)
        partitions = set()
        wait_for(lambda: partitions.update(partitions_of(b)) or len(partitions) == 4)
        assert partitions == {0, 1, 2, 3}


def is_shared(a, b, log, topic):
    """Whether both processes read, each its own half."""
    append(log, topic, 4)
    time.sleep(0.1)
    by_a, by_b = partitions_of(a), partitions_of(b)
    return len(by_a) == len(by_b) == 2 and not by_a & by_b


def partitions_of(worker):
    """Where what was read since the last call lay."""
    return {facts["at"][1] for facts in worker.heard_all() if "at" in facts}


def test_member_takes_its_shares_up_again_after_a_restart(place, log, topic, partitions):
    append(log, topic, 8)
    group = place.name("quick")
    with place.worker("member", group, "same", topic) as before:
        before.hear("value")
    again = log.consumer(group=group, member="same")
    again.subscribe([topic])
    settle(again)
    assert again.assignment() == partitions


def test_silent_member_loses_its_shares_and_joins_again_when_it_polls(place, log, topic):
    append(log, topic, 8)
    quick, group, revoked = {"session_timeout_ms": place.session_ms}, place.name("quick"), []
    silent, other = (place.open(**quick).consumer(group=group) for _ in range(2))
    silent.subscribe([topic], on_revoke=revoked.extend)
    settle(silent)
    before = silent.positions()
    revoked.clear()  # of a stall meanwhile
    other.subscribe([topic])
    wait_for(lambda: other.poll(timeout_ms=50) is not None and len(other.assignment()) == 4)
    assert revoked == []
    with pytest.raises(Fenced):
        silent.commit(before)
    settle(silent, other)
    assert set(revoked) == set(before)
    assert len(silent.assignment()) == 2
