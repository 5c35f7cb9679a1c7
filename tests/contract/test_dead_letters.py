"""`dead-letters list | show | replay` over every log: seen whole, sent again, counted."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pytest
from cli_run import Cli, new_cli
from join_run import JoinRun
from join_scripts import rew, scored, traj
from topic_events import append_events
from waiting import until

from streamrft.deploy import dead_letters
from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import partition_for
from streamrft.streams.settings import StreamSettings

FAST = StreamSettings(grace_ms=0)
HOME = partition_for(b"g1", 4)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], place) -> Cli:
    cli = new_cli(tmp_path, capsys)
    cli.change(name=place.prefix, event_log={"url": place.url})
    return cli


@pytest.fixture
def run(log, place, cli) -> JoinRun:
    """The join of the run that the configuration is about."""
    return JoinRun(log, namespace=f"p.{place.prefix}")


def refuse(
    run: JoinRun, *records: tuple[str, bytes | None], settings: StreamSettings = FAST
) -> None:
    """Let the join refuse records of group g1."""
    before = run.num("dead_letters")
    for topic, value in records:
        run.send_raw(topic, value, key=b"g1", partition=HOME)
    run.drive(lambda: run.num("dead_letters") == before + len(records), settings)


def letters(cli: Cli, *words: str) -> list[dict[str, Any]]:
    return cli.lines("dead-letters", "list", "--json", *words)


def letters_on(run: JoinRun) -> list[ev.DeadLetter]:
    found = [codec.decode(r.value, ev.DeadLetter, ev.Replay) for r in run.records("dead_letters")]
    return [event for event in found if isinstance(event, ev.DeadLetter)]


def is_balanced(cli: Cli) -> bool:
    """By the fold that is kept, and counted anew."""
    codes = [cli.run("status", *full)[0] for full in ((), ("--full",))]
    assert codes in ([0, 0], [1, 1])
    return codes == [0, 0]


# --- seen


def test_list_says_where_why_when_and_how_it_begins(cli, run):
    refuse(run, ("rewards", b'{"value": '), ("trajectories", b"\xc3\x02garbage"))
    code, out, _ = cli.run("dead-letters", "list")
    assert code == 0 and out.endswith("2 dead letters\n")
    assert f"rewards[{HOME}]@0  read by join-0" in out and "JSON reward: " in out
    assert '10 bytes: {"value": ' in out and "9 bytes: ..garbage" in out
    first, second = sorted(letters(cli), key=lambda letter: letter["topic"])
    assert (first["num_replays"], first["replay_of"], first["key"]) == (0, None, "g1")
    assert base64.b64decode(second["value_base64"]) == b"\xc3\x02garbage"
    assert abs(first["produced_at"] - now_ms()) < 60_000


def test_letters_are_chosen_by_topic_reader_time_and_reason(cli, run):
    refuse(run, ("rewards", b'{"value": '), ("trajectories", b"\xc3\x02garbage"))
    assert len(letters(cli, "--topic", "rewards")) == 1
    assert letters(cli, "--reader", "join-1") == []
    assert len(letters(cli, "--error", "json")) == len(letters(cli, "--since", "1h")) - 1 == 1
    time.sleep(0.01)
    assert letters(cli, "--since", "1ms") == []
    code, _, err = cli.run("dead-letters", "list", "--topic", "reward")
    assert code == 2 and "Did you mean 'rewards'" in err
    assert cli.run("dead-letters", "list", "--since", "soon")[0] == 2


def test_show_has_every_byte_and_the_fields_before_the_break(cli, run):
    whole = codec.encode(scored("g1:0:a", 1.0, at=1))
    refuse(run, ("trajectories", whole[:60]), ("rewards", bytes(range(256))))
    second, first = (str(x["id"]) for x in sorted(letters(cli), key=lambda x: x["topic"]))
    code, out, _ = cli.run("dead-letters", "show", first)
    assert code == 0 and "truncated" in out and "trajectory_id: 'g1:0:a'" in out
    dump = [line[14:61] for line in out.splitlines() if line.startswith("    0000")]
    assert bytes.fromhex("".join(dump)) == whole[:60]
    code, out, _ = cli.run("dead-letters", "show", second)
    assert "000000f0  f0 f1" in out and "ABCDEFGHIJKLMNO" in out
    code, _, err = cli.run("dead-letters", "show", "9999")
    assert code == 1 and "no such dead letter" in err


def test_show_raw_gives_the_bytes_alone(cli, run):
    refuse(run, ("rewards", b'{"value": \xff'))
    (letter,) = letters(cli)
    words = ["dead-letters", "show", str(letter["id"]), "--raw", "--config", str(cli.config)]
    done = subprocess.run(
        [sys.executable, "-m", "streamrft.deploy.cli", *words], capture_output=True, check=True
    )
    assert done.stdout == b'{"value": \xff'


def test_value_that_was_left_at_its_position_is_read_there(cli, run):
    small = replace(FAST, max_event_bytes=2_000)
    refuse(run, ("rewards", b"z" * 3_000), settings=small)
    (letter,) = letters(cli)
    assert letter["value_base64"] is None and "left at its position" in letter["error"]
    code, out, _ = cli.run("dead-letters", "show", str(letter["id"]))
    assert code == 0 and "value   3,000 bytes" in out
    assert cli.run("dead-letters", "replay", "--all")[0] == 0
    until(lambda: [r.value for r in run.records("rewards")] == [b"z" * 3_000] * 2)


def test_without_letters_the_list_is_empty_and_a_replay_sends_nothing(cli, run):
    assert cli.run("dead-letters", "list")[:2] == (0, "no dead letters\n")
    code, out, err = cli.run("dead-letters", "replay", "--all")
    assert (code, out) == (0, "") and err.startswith("0 replayed")
    code, _, err = cli.run("dead-letters", "replay")
    assert code == 2 and "--all" in err


# --- sent again


def test_a_reward_refused_for_its_clock_counts_once_its_time_is_allowed(cli, run):
    run.send(traj("g1:0:a", at=now_ms()))
    reward = {"event_id": "r1", "trajectory_id": "g1:0:a", "source": "judge", "value": 0.5}
    reward["produced_at"] = now_ms() + 600_000
    refuse(run, ("rewards", json.dumps(reward).encode()))
    assert cli.run("dead-letters", "replay", "--all")[0] == 0
    run.drive(lambda: len(letters_on(run)) == 2, FAST)  # nothing was mended: refused again
    first, again = letters(cli)
    assert (again["replay_of"], again["num_replays"], first["num_replays"]) == (first["id"], 0, 1)
    assert cli.run("dead-letters", "replay", "--all")[0] == 0
    run.drive(lambda: run.num("experiences") == 1, replace(FAST, max_skew_ms=3_600_000))
    assert run.experiences()[0].reward == 0.5
    assert cli.run("dead-letters", "replay", "--all")[0] == 0
    assert run.num("rewards") == 3 and len(letters_on(run)) == 2
    assert is_balanced(cli)


def of_tomorrow(event: ev.Event) -> tuple[dict[str, Any], bytes]:
    """A schema with one more field, and the event written with it."""
    schema = codec.schema_of(type(event))
    schema["fields"].append({"name": "mood", "type": "string", "default": ""})
    out = io.BytesIO()
    record = codec._to_record(type(event))(event) | {"mood": "good"}
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return schema, codec.MARKER + codec.fingerprint_of(schema) + out.getvalue()


def test_records_of_a_newer_schema_come_back_after_the_upgrade(cli, run, release):
    newer, trajectory = of_tomorrow(traj("g1:0:a", size=2, at=now_ms()))
    other, reward = of_tomorrow(rew("g1:1:a", 2.0, at=now_ms()))
    run.send(traj("g1:1:a", size=2, at=now_ms()))
    refuse(run, ("trajectories", trajectory), ("rewards", reward))
    assert {"fingerprint" in letter["error"] for letter in letters(cli)} == {True}
    assert is_balanced(cli)
    release(newer)
    release(other)
    assert is_balanced(cli), "the record can be read now, but is still only a dead letter"
    code, out, _ = cli.run("dead-letters", "replay", "--error", "fingerprint")
    assert code == 0 and len(out.splitlines()) == 2
    # a second replay at the same time, which sees no note of the first, sends them once more
    assert cli.run("dead-letters", "replay", "--error", "fingerprint", "--again")[0] == 0
    run.send(rew("g1:0:a", 1.0, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 2)
    assert len({r.value for r in run.records("trajectories")}) == 2, "the same bytes, thus ids"
    assert sorted(e.reward for e in run.experiences()) == [1.0, 2.0]
    assert run.drops() == []
    assert is_balanced(cli)


def test_a_trajectory_whose_id_was_read_has_its_end_and_is_not_sent_again(cli, run):
    whole = codec.encode(scored("g1:0:a", 1.0, at=now_ms()))
    refuse(run, ("trajectories", whole[:-1]), ("trajectories", b"\xc3\x01garbage garbage"))
    assert [d.trajectory_id for d in run.drops()] == ["g1:0:a"]
    code, out, err = cli.run("dead-letters", "replay", "--all")
    assert code == 1 and "g1:0:a was dropped as invalid" in out
    assert err == "1 replayed, 1 refused\n"
    until(lambda: run.num("trajectories") == 3)  # the garbage: nobody knows its id
    run.drive(lambda: len(letters_on(run)) == 3, FAST)
    assert is_balanced(cli)


def test_nothing_is_sent_of_a_record_without_value_or_of_a_topic_that_goes_by_order(cli, run):
    refuse(run, ("trajectories", None))
    letter = ev.DeadLetter(
        topic=run.topics.name("drops"), partition=0, offset=0, key=None, value=b"x", headers={},
        error="e", reader="trainer", produced_at=now_ms(),
    )  # fmt: skip
    append_events(run.log, run.topics, "dead_letters", letter)
    code, out, err = cli.run("dead-letters", "replay", "--all")
    assert code == 1 and "no value" in out and "only tasks, trajectories" in out
    assert err == "0 replayed, 2 refused\n"
    assert run.num("trajectories") == 1 and run.num("drops") == 0


def test_a_replayed_record_has_its_key_its_headers_and_its_place(cli, run):
    run.send_raw("rewards", b"no reward", key=b"g1", headers=[("traceparent", b"00-abc")])
    run.send_raw("rewards", b"without a key", partition=3)
    run.drive(lambda: run.num("dead_letters") == 2, FAST)
    first, second = sorted(letters(cli), key=lambda letter: letter["key"] is None)
    assert cli.run("dead-letters", "replay", str(first["id"]), str(second["id"]))[0] == 0
    until(lambda: run.num("rewards") == 4)
    found = {r.key: r for r in run.records("rewards") if len(r.headers) > (r.key is not None)}
    mark = ("streamrft-replay-of", str(first["id"]).encode())
    assert set(found[b"g1"].headers) == {("traceparent", b"00-abc"), mark}
    assert (found[b"g1"].value, found[b"g1"].partition) == (b"no reward", HOME)
    assert (found[None].value, found[None].partition) == (b"without a key", 3)


def test_a_task_goes_back_to_its_partition(cli, run):
    letter = ev.DeadLetter(
        topic=run.topics.name("tasks"), partition=9, offset=0, key=b"rows.1", value=b"x",
        headers={}, error="e", reader="explorer-0", produced_at=now_ms(),
    )  # fmt: skip
    append_events(run.log, run.topics, "dead_letters", letter)
    assert cli.run("dead-letters", "replay", "--topic", "tasks")[0] == 0
    until(lambda: run.num("tasks") == 1)
    (task,) = run.records("tasks")
    assert (task.partition, task.key, task.value) == (9, b"rows.1", b"x")
    code, out, _ = cli.run("tail", "dead_letters")
    assert code == 0 and "dead letter 0 was sent again" in out


def test_what_was_replayed_is_sent_again_only_when_told(cli, run):
    refuse(run, ("rewards", b"one"), ("rewards", b"two"))
    assert cli.run("dead-letters", "replay", "--topic", "rewards")[0] == 0
    assert {letter["num_replays"] for letter in letters(cli)} == {1}
    assert cli.run("dead-letters", "list")[1].count(", replayed") == 2
    code, out, err = cli.run("dead-letters", "replay", "--all")
    assert (code, out) == (0, "") and "--again" in err
    assert cli.run("dead-letters", "replay", "--all", "--again")[0] == 0
    until(lambda: run.num("rewards") == 6)
    assert {letter["num_replays"] for letter in letters(cli)} == {2}


def test_a_replay_whose_note_is_not_shown_in_time_says_what_it_waited_for(cli, run, monkeypatch):
    refuse(run, ("rewards", b'{"value": '))
    monkeypatch.setattr(dead_letters, "_VISIBLE_S", 0.0)
    monkeypatch.setattr(dead_letters.DeadLetters, "_end", lambda self: 1)
    code, out, err = cli.run("dead-letters", "replay", "--all")
    assert code == 1 and "is to end at 2, and 1 is shown" in err
    assert out.endswith(".rewards\n")
    until(lambda: letters(cli)[0]["num_replays"] == 1, "the note of what was sent")


@pytest.mark.parametrize("point", ["replay.before_commit", "replay.committed"])
def test_a_killed_replay_loses_and_doubles_nothing(cli, run, tmp_path, point):
    refuse(run, *[("rewards", b"reward %d" % i) for i in range(150)])
    command = [sys.executable, "-m", "streamrft.deploy.cli", "dead-letters", "replay", "--all"]
    command += ["--config", str(cli.config)]
    environment = os.environ | {"STREAMRFT_KILL_AT": f"{point}={tmp_path / 'killed'}"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -9
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left = 150 if point == "replay.before_commit" else 50
    assert done.stderr == f"{left} replayed, 0 refused\n"
    until(lambda: run.num("rewards") >= 300)
    values = [r.value for r in run.records("rewards")]
    assert sorted(values) == sorted([b"reward %d" % i for i in range(150)] * 2)
