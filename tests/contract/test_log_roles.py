"""Role leases of the log: one holder, rising epochs, fenced producers, on every adapter."""

import time

import pytest
from log_process import wait_for

from streamrft.schemas.errors import Fenced, Timeout
from streamrft.streams.reading import begins, read_to_end
from streamrft.streams.sqlite.store import machine_ms


@pytest.fixture
def role(place):
    return place.name("trainer")


@pytest.fixture
def pass_ms(monkeypatch):
    """Let time go on; on the machine's clock, which the embedded log goes by, none passes else."""
    now_ms = [machine_ms()]
    monkeypatch.setattr("streamrft.streams.sqlite.roles.machine_ms", lambda: now_ms[0])

    def pass_(ms):
        now_ms[0] += ms
        time.sleep(ms / 1000)

    return pass_


def values_of(log, topic):
    return [r.value for r in read_to_end(log, begins(log, topic))]


def test_epochs_rise_with_every_holder(log, role):
    epochs = []
    for owner in ("a", "b", "c"):
        lease = log.acquire(role, owner=owner, ttl_ms=10_000, timeout_ms=5_000)
        assert (lease.role, lease.owner, lease.ttl_ms) == (role, owner, 10_000)
        epochs.append(lease.epoch)
        log.release(lease)
    assert epochs == sorted(set(epochs))


def test_held_role_times_out_naming_its_holder(place, log, role):
    log.acquire(role, owner="first", ttl_ms=30_000, timeout_ms=0)
    began = time.monotonic()
    with pytest.raises(Timeout, match="first"):
        place.open().acquire(role, owner="second", ttl_ms=30_000, timeout_ms=300)
    assert 0.25 < time.monotonic() - began < 20


def test_silent_holder_is_succeeded_when_its_lease_ends(place, log, role):
    first = log.acquire(role, owner="first", ttl_ms=300, timeout_ms=0)
    second = place.open().acquire(role, owner="second", ttl_ms=300, timeout_ms=60_000)
    assert second.epoch > first.epoch
    with pytest.raises(Fenced, match="first held it under epoch"):
        log.renew(first)
    log.release(first)
    place.open().renew(second)


def test_renewed_lease_is_kept_beyond_its_first_end(place, log, role, pass_ms):
    lease = log.acquire(role, owner="first", ttl_ms=600, timeout_ms=0)
    other = place.open()
    for _ in range(5):
        pass_ms(200)
        log.renew(lease)
        with pytest.raises(Timeout):
            other.acquire(role, owner="second", ttl_ms=600, timeout_ms=0)


def test_roles_are_independent(place, log):
    roles = {place.name("trainer"), place.name("scheduler")}
    leases = [log.acquire(r, owner="a", ttl_ms=10_000, timeout_ms=0) for r in sorted(roles)]
    for lease in leases:
        log.renew(lease)
    assert {lease.role for lease in leases} == roles


def test_fenced_producer_writes_while_the_lease_is_held(log, topic, role):
    producer = log.producer(fence=log.acquire(role, owner="a", ttl_ms=10_000, timeout_ms=0))
    producer.send(topic, b"flushed")
    producer.flush()
    with producer.transaction():
        producer.send(topic, b"transacted")
    wait_for(lambda: len(values_of(log, topic)) >= 2)
    assert sorted(values_of(log, topic)) == [b"flushed", b"transacted"]


def test_fenced_producer_writes_nothing_after_its_successor(place, log, topic, role):
    producer = log.producer(fence=log.acquire(role, owner="old", ttl_ms=200, timeout_ms=0))
    other = place.open()
    lease = other.acquire(role, owner="new", ttl_ms=10_000, timeout_ms=60_000)
    successor = other.producer(fence=lease)
    successor.send(topic, b"new", partition=0)
    successor.flush()
    with pytest.raises(Fenced):
        with producer.transaction():
            producer.send(topic, b"transacted", partition=0)
    producer.send(topic, b"flushed", partition=0)
    with pytest.raises(Fenced, match="old held it"):
        producer.flush()
    successor.send(topic, b"last", partition=0)
    successor.flush()
    wait_for(lambda: b"last" in values_of(log, topic))
    assert values_of(log, topic) == [b"new", b"last"]


def test_fenced_producer_learns_of_its_end_by_an_empty_flush(log, role):
    lease = log.acquire(role, owner="old", ttl_ms=10_000, timeout_ms=0)
    producer = log.producer(fence=lease)
    assert producer.flush() == []
    log.release(lease)
    with pytest.raises(Fenced):
        producer.flush()


def test_role_of_a_killed_process_is_taken_at_once(place, log, topic, role):
    """And not when its lease ends, in ten minutes."""
    with place.worker("holder", role, "killed", "600000", topic) as holder:
        epoch = holder.hear("epoch")
        with pytest.raises(Timeout, match="killed"):
            log.acquire(role, owner="heir", ttl_ms=1_000, timeout_ms=0)
        holder.kill()
        wait_for(lambda: holder.process.poll() is not None)
        assert log.acquire(role, owner="heir", ttl_ms=1_000, timeout_ms=60_000).epoch > epoch


def test_role_of_a_killed_process_that_nobody_reaped_is_taken_at_once(place, log, topic, role):
    with place.worker("holder", role, "zombie", "600000", topic) as holder:
        epoch = holder.hear("epoch")
        holder.kill()
        assert log.acquire(role, owner="heir", ttl_ms=1_000, timeout_ms=60_000).epoch > epoch
        assert holder.process.returncode is None
