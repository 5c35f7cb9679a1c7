"""`topics plan | apply | describe`, and the port's changes of topics, over every log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import Cli, new_cli

from streamrft.deploy.plan import plan
from streamrft.deploy.views.place import current_stage, was_started
from streamrft.schemas.errors import LogError, UnknownTopic
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Log, TopicSpec

DAY_MS = 86_400_000


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], place) -> Cli:
    """A configuration on the place's log, its names new in every test."""
    cli = new_cli(tmp_path, capsys)
    cli.change(name=place.prefix, event_log=event_log(place))
    return cli


def event_log(place, **settings: Any) -> dict[str, Any]:
    return {"url": place.url, **settings}


def name(place, topic: str) -> str:
    return f"p.{place.prefix}.{topic}"


def create(cli: Cli, log: Log) -> None:
    run = plan(cli.config)
    log.ensure_topics(run.topic_specs(run.stage(None)))


def write(log: Log, topic: str, num: int = 3, *, age_ms: int = 0) -> None:
    producer = log.producer()
    for i in range(num):
        producer.send(topic, b"value", key=b"k%d" % i, timestamp_ms=now_ms() - age_ms)
    producer.flush()


def changes(cli: Cli, *words: str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    """Exit code of a plan, and its changes by (topic without its namespace, setting)."""
    code, out, err = cli.run("topics", "plan", "--json", *words)
    assert not err
    found = json.loads(out)["changes"]
    return code, {(c["topic"].split(".")[-1], c["setting"]): c for c in found}


# --- the command


def test_a_new_run_gets_its_topics_and_then_nothing_is_to_do(cli, place, log):
    code, found = changes(cli)
    assert code == 3 and len(found) == 12
    assert {c["action"] for c in found.values()} == {"create"}
    code, out, _ = cli.run("topics", "apply")
    assert code == 0 and "64 partitions" in out and "done: 12 changes made" in out
    assert log.describe([name(place, "tasks")])[name(place, "tasks")].spec.num_partitions == 64
    assert cli.run("topics", "plan")[:1] == (0,)
    code, out, _ = cli.run("topics", "apply")
    assert code == 0 and "nothing to do" in out
    create(cli, log)  # what a run's processes ask for is the same


def test_longer_retention_and_larger_records_are_made_at_once(cli, place, log):
    cli.change(event_log=event_log(place, retention={"drops": "1d"}, max_event_bytes=10_000))
    create(cli, log)
    write(log, name(place, "drops"))
    cli.change(event_log=event_log(place, retention={"drops": "2d"}, max_event_bytes=20_000))
    code, found = changes(cli)
    assert code == 3 and len(found) == 13 + (place.url.startswith("kafka"))  # and segment.ms
    change = found["drops", "retention.ms"]
    assert (change["action"], change["found"], change["wanted"]) == (
        "alter",
        str(DAY_MS),
        str(2 * DAY_MS),
    )
    assert cli.run("topics", "apply")[0] == 0
    spec = log.reopen().describe([name(place, "drops")])[name(place, "drops")].spec
    assert (spec.retention_ms, spec.max_event_bytes) == (2 * DAY_MS, 20_000)
    assert cli.run("topics", "plan")[0] == 0


def test_what_deletes_records_is_refused_until_it_is_allowed(cli, place, log):
    create(cli, log)
    write(log, name(place, "rewards"), 5, age_ms=2 * DAY_MS)
    write(log, name(place, "rewards"), 2)
    cli.change(
        event_log=event_log(
            place, retention={"rewards": "1d", "drops": "1d"}, max_event_bytes=9_999
        )
    )
    cli.change(rewards={"human": {"deadline": "1h"}}, streams={"late_horizon": "1h"})
    code, found = changes(cli)
    assert code == 4
    refused = {place: c for place, c in found.items() if c["action"] == "refuse"}
    assert set(refused) == {("rewards", "retention.ms"), ("rewards", "max.message.bytes")}
    assert "5 records go at once" in refused["rewards", "retention.ms"]["why"]
    code, out, _ = cli.run("topics", "apply")
    assert code == 4 and "--allow-data-loss" in out and "nothing is done" in out
    assert changes(cli) == (4, found)  # all or nothing
    assert changes(cli, "--allow-data-loss")[0] == 3
    assert cli.run("topics", "apply", "--allow-data-loss")[0] == 0
    assert cli.run("topics", "plan")[0] == 0
    info = log.reopen().describe([name(place, "rewards")])[name(place, "rewards")]
    assert (info.spec.retention_ms, info.spec.max_event_bytes) == (DAY_MS, 9_999)


def test_more_partitions_move_keys_and_fewer_are_impossible(cli, place, log):
    create(cli, log)
    write(log, name(place, "trajectories"))
    cli.change(event_log=event_log(place, partitions=6))
    code, found = changes(cli)
    assert code == 4 and {place for place, c in found.items() if c["action"] == "refuse"} == {
        ("trajectories", "partitions")
    }
    assert "--allow-moving-keys" in found["trajectories", "partitions"]["why"]
    assert len(found) == 6  # the others were never written to
    assert cli.run("topics", "apply", "--allow-moving-keys")[0] == 0
    joined = [name(place, t) for t in ("trajectories", "rewards", "join_state")]
    found = log.reopen().describe(joined)
    assert {info.spec.num_partitions for info in found.values()} == {6}
    assert sum(found[joined[0]].end.values()) == 3
    cli.change(event_log=event_log(place, partitions=4))
    code, out, _ = cli.run("topics", "apply", "--allow-moving-keys", "--allow-data-loss")
    assert code == 4 and "no log takes partitions away" in out


def test_a_cleanup_that_keeps_less_is_refused_and_one_that_keeps_more_is_not(cli, place, log):
    log.ensure_topics(
        [
            TopicSpec(name(place, "join_state"), 4, "delete"),
            TopicSpec(name(place, "drops"), 4, "compact"),
        ]
    )
    write(log, name(place, "join_state"))
    write(log, name(place, "drops"))
    with pytest.raises(LogError, match="fixed when a topic is created"):
        create(cli, log)
    _, found = changes(cli)
    assert found["drops", "cleanup.policy"]["action"] == "alter"
    assert found["join_state", "cleanup.policy"]["action"] == "refuse"
    assert cli.run("topics", "apply", "--allow-data-loss")[0] == 0
    create(cli, log.reopen())


def test_topics_of_others_in_the_namespace_are_shown_and_left(cli, place, log):
    create(cli, log)
    log.ensure_topics([TopicSpec(name(place, "notes"), 2), TopicSpec(f"{name(place, 'x')}y", 1)])
    write(log, name(place, "notes"))
    code, out, _ = cli.run("topics", "plan")
    assert code == 0 and f"leave    {name(place, 'notes')}" in out
    code, out, _ = cli.run("topics", "describe", "--json")
    found = {t["topic"]: t for t in map(json.loads, out.splitlines())}
    assert code == 0 and len(found) == 14
    notes = found[name(place, "notes")]
    assert (notes["in_catalogue"], notes["num_partitions"]) == (False, 2)
    assert sum(end for _, end in notes["offsets"]) == 3
    assert notes["settings"]["retention.ms"] == "-1"


def test_describe_tells_partitions_settings_offsets_and_size(cli, place, log):
    create(cli, log)
    write(log, name(place, "drops"))
    code, out, _ = cli.run("topics", "describe")
    (block,) = [part for part in out.split(f"p.{place.prefix}.") if part.startswith("drops")]
    assert code == 0 and block.startswith("drops  4 partitions")
    assert "retention.ms               -1 (no limit)" in block and "[1] 0..3" in block
    if place.url.startswith("sqlite"):
        assert "records                    3, 21 bytes" in block


def test_before_there_is_a_log_plan_makes_none(tmp_path, capsys):
    cli = new_cli(tmp_path, capsys)
    assert changes(cli)[0] == 3
    assert not (tmp_path / "runs").exists()
    assert cli.run("topics", "describe")[0] == 1


def test_topics_made_by_hand_are_no_run_yet(cli, place, log):
    """A run that may not continue another starts on them, and stages are found by their records."""
    cli.change(stages=[{"stage_name": "one"}, {"stage_name": "two"}])
    run = plan(cli.config)
    for stage in ("two", "one"):
        assert cli.run("topics", "apply", "--stage", stage)[0] == 0
    assert [was_started(log, stage) for stage in run.stages] == [False, False]
    assert current_stage(log, run).name == "one"
    write(log, name(place, "two.tasks"))
    assert current_stage(log, run).name == "two"
    code, out, _ = cli.run("topics", "plan", "--stage", "one")
    assert code == 0 and "leave" not in out


def test_topics_without_an_action_is_wrong_usage(cli):
    with pytest.raises(SystemExit) as ended:
        cli.run("topics")
    assert ended.value.code == 2


# --- the port


def test_altered_topic_is_as_it_was_asked_for_and_keeps_its_records(place, log, topic):
    write(log, topic, 10)
    log.alter_topic(topic, num_partitions=6, settings={"retention.ms": "3600000"})
    log.alter_topic(topic, num_partitions=6, settings={"retention.ms": "3600000"})
    other = place.open()
    state = other.topic_states([topic])[topic]
    assert (state.num_partitions, state.settings["retention.ms"]) == (6, "3600000")
    assert sum(other.describe([topic])[topic].end.values()) == 10
    producer = other.producer()
    producer.send(topic, b"x", partition=5)
    assert producer.flush()[0].partition == 5


def test_state_for_a_spec_is_the_state_that_its_topic_then_has(place, log):
    for cleanup in ("delete", "compact"):
        spec = TopicSpec(place.name(cleanup), 3, cleanup, 7 * DAY_MS, 100_000)
        log.ensure_topics([spec])
        asked, found = log.state_for(spec), log.topic_states([spec.name])[spec.name]
        assert found.num_partitions == asked.num_partitions
        assert found.settings.items() >= asked.settings.items()


def test_what_cannot_be_altered_is_an_error(log, topic, place):
    with pytest.raises(LogError, match="has 4 partitions; 3 asked for"):
        log.alter_topic(topic, num_partitions=3)
    with pytest.raises(LogError, match=r"no\.such"):
        log.alter_topic(topic, settings={"no.such": "1"})
    with pytest.raises(UnknownTopic):
        log.alter_topic(place.name("missing"), num_partitions=3)
    with pytest.raises(UnknownTopic):
        log.topic_states([place.name("missing")])
