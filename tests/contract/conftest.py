"""The log adapters that the contract runs over: each test once for each of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from log_process import Worker

from streamrft.streams.log import Limits, Log, Partition, TopicSpec, open_log

ADAPTERS = ("sqlite", "kafka")
ADAPTERS_OF = {
    "test_log_groups": ("sqlite", "kafka", "kafka-classic"),
    "test_log_sqlite": ("sqlite",),
    "test_kafka_log": ("kafka",),
    "test_worker": ("sqlite", "kafka", "kafka-faust"),
    "test_worker_history": ("sqlite", "kafka", "kafka-faust"),
    "test_worker_poison": ("sqlite", "kafka", "kafka-faust"),
}

# what Faust's shell does by itself; the operators are the same, so the rest runs with `make faults`
OF_FAUST = (
    "test_every_kind_of_poison_in_one_batch_is_set_aside_and_neighbours_go_on",
    "test_random_bytes_stop_nothing",
    "test_records_without_a_key_count_by_what_they_say",
    "test_giant_records_of_others_are_left_where_they_lie",
    "test_a_store_that_is_away_holds_its_partition_by_name_until_it_is_back",
    "test_a_restarted_worker_goes_on_with_open_groups",
    "test_a_reward_on_another_partition_is_sent_on",
    "test_deadlines_fire_on_idle_topics_at_recorded_clock_events",
    "test_a_run_over_recorded_clocks_closes_what_was_closed_live",
)


# what a command does with records, wherever they come from: on Kafka with `make faults`
OF_THE_COMMAND = (
    "test_letters_are_chosen_by_topic_reader_time_and_reason",
    "test_show_has_every_byte_and_the_fields_before_the_break",
    "test_show_raw_gives_the_bytes_alone",
    "test_without_letters_the_list_is_empty_and_a_replay_sends_nothing",
    "test_records_of_a_newer_schema_come_back_after_the_upgrade",
    "test_a_trajectory_whose_id_was_read_has_its_end_and_is_not_sent_again",
    "test_nothing_is_sent_of_a_record_without_value_or_of_a_topic_that_goes_by_order",
    "test_what_was_replayed_is_sent_again_only_when_told",
    "test_topics_of_others_in_the_namespace_are_shown_and_left",
    "test_describe_tells_partitions_settings_offsets_and_size",
    "test_topics_made_by_hand_are_no_run_yet",
)

# no member is taken for gone because the machine was busy for a while
PATIENT_MS = 30_000


@dataclass
class Place:
    """Where the log of one test lies; names are new in every test, so that a broker can be shared.

    `session_ms` is the shortest session that the adapter allows in a test, `patient_ms` the one
    that members have unless a test asks for another; `engine` is the shell of join workers.
    """

    url: str
    session_ms: int
    patient_ms: int = PATIENT_MS
    prefix: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    opened: list[Log] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    compacts_soon: dict[str, str] = field(default_factory=dict)
    engine: Literal["native", "faust"] = "native"
    forgets_tombstones: dict[str, str] = field(default_factory=lambda: {"tombstone_ms": "0"})

    def name(self, name: str) -> str:
        """A topic, group or role of this test alone."""
        return f"{self.prefix}.{name}"

    def patient_group(self, name: str) -> str:
        """A group of this test whose sessions are patient also where the broker sets them."""
        if self.options.get("group.protocol") == "consumer":
            _set_session(self.url, self.name(name), PATIENT_MS)
        return self.name(name)

    def open(self, **limits: Any) -> Log:
        """Another connection, closed when the test ends."""
        options = {**self.options, **limits.pop("options", {})}
        limits = {"session_timeout_ms": self.patient_ms, "options": options, **limits}
        log = open_log(self.url, Limits(**limits))
        self.opened.append(log)
        return log

    def worker(self, kind: str, *arguments: str) -> Worker:
        """A process of its own on this log."""
        return Worker(self.url, self.session_ms, kind, *arguments, options=self.options)

    def create(self, log: Log, name: str, num_partitions: int = 4, **settings: Any) -> str:
        """Create a topic; its full name."""
        log.ensure_topics([TopicSpec(self.name(name), num_partitions, **settings)])
        return self.name(name)


def _set_session(url: str, group: str, session_ms: int) -> None:
    from confluent_kafka import admin

    entry = admin.ConfigEntry(
        "consumer.session.timeout.ms",
        str(session_ms),
        incremental_operation=admin.AlterConfigOpType.SET,
    )
    resource = admin.ConfigResource(admin.ResourceType.GROUP, group, incremental_configs=[entry])
    client = admin.AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    (done,) = client.incremental_alter_configs([resource]).values()
    done.result(60)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a `place` run on each adapter, those of groups on both of Kafka's protocols."""
    if "place" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        adapters = ADAPTERS_OF.get(module, ADAPTERS)
        marks: dict[str, Any] = {}
        if metafunc.function.__name__ not in OF_FAUST:
            marks["kafka-faust"] = (pytest.mark.slow,)
        if metafunc.function.__name__ in OF_THE_COMMAND:
            marks["kafka"] = (pytest.mark.slow,)
        params = [pytest.param(a, marks=marks.get(a, ())) for a in adapters]
        metafunc.parametrize("place", params, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        place = Place(f"sqlite:///{tmp_path}/run/log.db", session_ms=1_500)
    else:
        place = Place(request.getfixturevalue("kafka_url"), session_ms=1_500)
        is_classic = request.param == "kafka-classic"
        place.options["group.protocol"] = "classic" if is_classic else "consumer"
        if is_classic:  # a member hears of a rebalance with its heartbeat
            place.options["heartbeat.interval.ms"] = "200"
        if request.param == "kafka-faust":
            place.engine, place.patient_ms = "faust", place.session_ms
        place.compacts_soon = {
            "topic.segment.ms": "50",
            "topic.min.cleanable.dirty.ratio": "0.01",
        }
        place.forgets_tombstones = {"topic.delete.retention.ms": "0"}
    yield place
    for log in place.opened:
        log.close()


@pytest.fixture
def log(place: Place) -> Log:
    return place.open()


@pytest.fixture
def topic(place: Place, log: Log) -> str:
    """A topic with four partitions."""
    return place.create(log, "topic")


@pytest.fixture
def partitions(topic: str) -> list[Partition]:
    return [Partition(topic, p) for p in range(4)]
