"""What the Faust shell needs of Faust without a promise: fails when a release changes it."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
from confluent_kafka import Producer
from join_run import JoinRun
from join_scripts import scored
from waiting import until

from streamrft.schemas.errors import ConfigError, LogError, LogUnavailable
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Limits, Partition, TopicSpec, open_log

pytest.importorskip("faust")

from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.group_coordinator import GroupCoordinator
from faust.transport.drivers import aiokafka as driver

from streamrft.streams.faust import internals, membership
from streamrft.streams.faust.app import build
from streamrft.streams.faust.consumer import FaustConsumer
from streamrft.streams.faust.exchange import Exchange
from streamrft.streams.faust.membership import EmbeddedFaust, HostedFaust
from streamrft.streams.faust.security import credentials
from streamrft.streams.kafka.options import Options


@pytest.fixture
def log(kafka_url) -> Iterator:
    log = open_log(kafka_url, Limits(session_timeout_ms=6_000))
    yield log
    log.close()


@pytest.fixture
def topics(log) -> tuple[str, str]:
    """Two co-partitioned topics that only this test has."""
    prefix = f"test-{secrets.token_hex(4)}"
    names = (f"{prefix}.trajectories", f"{prefix}.rewards")
    log.ensure_topics([TopicSpec(name, 4) for name in names])
    return names


class Member:
    """One Faust application in a group."""

    def __init__(self, log, group: str, topics) -> None:
        self.exchange = Exchange()
        self.faust = EmbeddedFaust(partial(build, log.options, group), self.exchange)
        self.faust.start(topics)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.faust.stop()

    @property
    def numbers(self) -> dict[str, set[int]]:
        """Partition numbers by topic."""
        found: dict[str, set[int]] = {}
        for topic, partition in self.exchange.assigned:
            found.setdefault(topic, set()).add(partition)
        return found


def test_the_release_is_the_one_that_was_looked_into():
    assert version("faust-streaming") == internals.VERSION


def test_what_is_overridden_is_there():
    made = inspect.getsource(driver.AIOKafkaConsumerThread._create_worker_consumer)
    assert "table_standby_replicas > 0" in made, "the assignor that keeps topics together"
    assert "isolation_level" in made
    assert "_new_consumer_thread" in vars(driver.Consumer)
    assert "_ask" not in vars(driver.AIOKafkaConsumerThread)
    asked = inspect.getsource(GroupCoordinator.check_errors)
    assert "_error_consumed_fut.set_result" in asked and "raise exc" in asked
    assert list(inspect.signature(driver.Consumer._commit).parameters) == ["self", "offsets"]
    started = inspect.getsource(AIOKafkaConsumer.start)
    assert "isolation_level=self._isolation_level" in started
    assert "fetch_max_wait_ms=self._fetch_max_wait_ms" in started


def test_only_committed_records_come_and_positions_go_over_markers(log, topics, kafka_url):
    name = topics[0]
    writer = Producer(
        {"bootstrap.servers": kafka_url.removeprefix("kafka://"), "transactional.id": name}
    )
    writer.init_transactions()
    for i, end in enumerate((writer.abort_transaction, writer.commit_transaction) * 2):
        writer.begin_transaction()
        writer.produce(name, f"{i}".encode(), partition=0)
        writer.flush()
        end()
    with Member(log, f"{name}.group", topics) as member:
        consumer = FaustConsumer(log, member.faust, member.exchange)
        member.faust.start = lambda topics: None
        consumer.subscribe(topics)
        until(lambda: bool(member.exchange.assigned))
        consumer.poll()
        place = Partition(name, 0)
        consumer.seek(place, 0)
        end = log.end_offsets([place])[place]
        values: list[bytes | None] = []

        def is_at_end() -> bool:
            values.extend(r.value for r in consumer.poll(100, 200))
            return consumer.positions()[place] == end

        until(is_at_end)
    assert values == [b"1", b"3"]
    assert end == 8


def test_positions_are_stored_for_the_group(log, topics):
    group, place = f"{topics[0]}.group", Partition(topics[0], 2)
    with Member(log, group, topics) as member:
        until(lambda: bool(member.exchange.assigned))
        assert all(t.daemon for t in threading.enumerate() if t is not threading.main_thread())
        member.exchange.note({place: 7})
        until(lambda: log.consumer(group=group).committed([place]) == {place: 7})


def test_a_native_member_beside_fausts_is_told_who_holds_the_group(log, topics):
    group = f"{topics[0]}.group"
    with Member(log, group, topics) as member:
        until(lambda: bool(member.exchange.assigned))
        native = log.consumer(group=group, member="native")
        native.subscribe(topics)
        with pytest.raises(LogError, match="members of another protocol(.|\n)*streams.engine"):
            until(lambda: bool(native.poll(timeout_ms=200)))


def test_faust_beside_native_members_says_that_it_is_refused_and_joins_when_they_left(log):
    run = JoinRun(log, namespace=f"test-{secrets.token_hex(4)}", engine="faust")
    other = log.reopen()
    native = other.consumer(group=f"{run.topics.namespace}.join")
    native.subscribe([run.topics.name("trajectories"), run.topics.name("rewards")])
    until(lambda: native.poll(timeout_ms=50) == [] and native.assignment(), "the native share")
    run.send(scored("g1:0:a", 1.0, at=now_ms()))

    def is_joined() -> bool:
        if any(blocker.endswith("--engine") for blocker in run.process.blockers):
            native.close()
        else:
            native.poll(timeout_ms=0)
        return run.num("experiences") == 1

    run.drive(is_joined)
    other.close()
    (refused,) = (b for b in run.process.blockers if "refuses Faust" in b)
    assert f"a share of the partitions; the group '{run.topics.namespace}.join'" in refused


def test_workers_share_partitions_and_each_has_a_number_of_all_topics(log, topics):
    group = f"{topics[0]}.group"
    with Member(log, group, topics) as one:
        until(lambda: len(one.exchange.assigned) == 8)
        with Member(log, group, topics) as two:
            until(lambda: {len(m.exchange.assigned) for m in (one, two)} == {4})
            for member in (one, two):
                first, second = member.numbers.values()
                assert first == second
            assert set(one.exchange.assigned) & set(two.exchange.assigned) == set()
        until(lambda: len(one.exchange.assigned) == 8)


def test_one_that_ends_by_itself_is_started_again(log, topics):
    with Member(log, f"{topics[0]}.group", topics) as member:
        until(lambda: bool(member.exchange.assigned))
        loop, stopping = member.faust._loop, member.faust._stopping
        loop.call_soon_threadsafe(stopping.set)
        until(lambda: not member.exchange.assigned)

        def is_back() -> bool:
            try:
                member.faust.check()
            except Exception as error:
                assert "Faust ended" in str(error)
            return bool(member.exchange.assigned)

        until(is_back)


def test_what_ended_faust_is_told_although_it_does_not_stop(monkeypatch, caplog):
    class Stuck:
        async def start(self) -> None:
            raise RuntimeError("what ended it")

        async def stop(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(membership, "_STOP_S", 0.1)
    faust: Any = EmbeddedFaust(lambda *_: Stuck(), Exchange())  # type: ignore[arg-type]
    faust.start(())
    until(lambda: not faust._thread.is_alive())
    with pytest.raises(LogUnavailable, match="what ended it"):
        faust.check()
    assert "did not stop in order" in caplog.text


def test_both_callbacks_run_in_poll_with_what_comes_and_goes(log, topics):
    exchange, told = Exchange(), []
    consumer = FaustConsumer(log, HostedFaust(), exchange)
    consumer.subscribe(
        topics,
        on_assign=lambda ps: told.append(("assigned", ps)),
        on_revoke=lambda ps: told.append(("revoked", ps)),
    )
    of = {n: sorted(Partition(topic, n) for topic in topics) for n in range(3)}
    exchange.assign(of[0] + of[1])
    assert told == []
    consumer.poll()
    exchange.assign(of[1] + of[2])
    consumer.poll()
    consumer.poll()
    assert told == [("assigned", sorted(of[0] + of[1])), ("revoked", of[0]), ("assigned", of[2])]


def test_rights_are_said_in_fausts_terms(monkeypatch):
    monkeypatch.setenv("STREAMRFT_KAFKA_USERNAME", "join")
    monkeypatch.setenv("STREAMRFT_KAFKA_PASSWORD", "not-in-any-file")

    def of(**options: str):
        given = {name.replace("_", "."): value for name, value in options.items()}
        return credentials(Options.of("kafka://localhost:9092", Limits(options=given)))

    plain = of(security_protocol="SASL_PLAINTEXT")
    assert (plain.username, plain.mechanism.value) == ("join", "PLAIN")
    assert plain.ssl_context is None
    assert of(sasl_mechanism="SCRAM-SHA-512").ssl_context is not None
    assert "not-in-any-file" not in repr(plain)
    with pytest.raises(ConfigError, match="OAUTHBEARER.*engine: native"):
        of(sasl_mechanism="OAUTHBEARER")
    with pytest.raises(ConfigError, match="ssl.keystore.location.*engine: native"):
        of(ssl_keystore_location="/x")
