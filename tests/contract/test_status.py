"""`status` and `explain` over a real log: the ledger balances, and a hole in it is named."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_run import Cli, append, cli_with_topics, cut, join_everything, small_run, trajectory

from streamrft.deploy.views.status import status_of

REWARD = {"event_id": "r1", "trajectory_id": "rows.2:0:a", "source": "human", "value": 0.5}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_with_topics(tmp_path, capsys)


@pytest.fixture
def small(cli: Cli) -> Cli:
    return small_run(cli)


def test_status_counts_every_place_by_itself(small: Cli) -> None:
    (found,) = small.lines("status", "--json")
    assert found["balanced"] is True
    assert found["produced"] == 7
    assert {k: n for k, n in found["states"].items() if n} == {"trained": 2, "failed": 1}
    assert found["pending"] == {"total": 4, "unjoined": 1, "open": 1, "ready": 2}
    assert (found["step"], found["reward_mean"], found["goal_reached"]) == (1, 0.5, True)
    code, out, _ = small.run("status")
    assert code == 0
    assert "balanced  7 produced = 2 trained + 1 dropped + 4 pending" in out


def test_the_kept_fold_and_a_count_anew_agree(small: Cli) -> None:
    first = small.lines("status", "--json")[0]
    ledger = small.config.parent / "runs/p/n/ledger.msgpack"
    assert ledger.exists()
    with small.place() as place:
        append(place, "trajectories", trajectory(3, 1), trajectory(4, 0))
    join_everything(small)
    with small.place() as place:
        append(place, "train_steps", cut(place, 2, "rows.1:0:a", "rows.1:1:a"))
    kept, anew = small.lines("status", "--json")[0], small.lines("status", "--json", "--full")[0]
    for found in (kept, anew):
        assert found["produced"] == first["produced"] + 2
        assert found["states"]["trained"] == 4
        assert found["pending"] == {"total": 4, "unjoined": 0, "open": 2, "ready": 2}
    ledger.write_bytes(b"rubbish")
    assert small.lines("status", "--json")[0]["produced"] == anew["produced"]


def test_retention_of_experiences_does_not_unbalance_what_was_trained(small: Cli) -> None:
    assert small.lines("status", "--json")[0]["balanced"]
    with sqlite3.connect(small.config.parent / "runs/p/n/log.db") as db:
        (topic,) = db.execute("select topic_id from topics where name='p.n.experiences'").fetchone()
        db.execute("delete from records where topic_id=?", (topic,))
        db.execute("update partitions set first_offset=next_offset where topic_id=?", (topic,))
    db.close()
    kept = small.lines("status", "--json")[0]
    anew = json.loads(small.run("status", "--json", "--full")[1])
    assert kept["balanced"] is True
    assert anew["states"] == kept["states"]
    assert [f.split(": ")[1] for f in anew["faults"]] == [
        "its experience was deleted by retention before it was trained on"
    ] * 2


def test_without_room_to_keep_the_fold_status_still_counts(
    small: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert small.lines("status", "--json")[0]["produced"] == 7


@pytest.mark.parametrize(
    ("topic", "group", "named"),
    [
        ("experiences", "rows.0", "rows.0:1:a: trained by main/1, but it never was an experience"),
        ("experiences", "rows.1", "rows.1:1:a: lost: read by the join"),
        ("drops", "rows.2", "rows.2:1:a: lost: read by the join"),
        ("trajectories", "rows.1", "rows.1:1:a: an experience, but no such trajectory"),
    ],
)
def test_one_deleted_record_makes_status_fail_and_is_named(
    topic: str, group: str, named: str, small: Cli
) -> None:
    assert small.run("status", "--full")[0] == 0
    _delete_last(small, topic, group)
    code, out, _ = small.run("status", "--full")
    assert code == 1
    assert "not balanced" in out
    assert named in out
    code, out, _ = small.run("status", "--full", "--json")
    assert code == 1
    assert named in json.loads(out)["faults"][0]


def _delete_last(cli: Cli, topic: str, group: str) -> None:
    """Damage the file behind the log's back."""
    path = cli.config.parent / "runs" / "p" / "n" / "log.db"
    with sqlite3.connect(path) as db:
        done = db.execute(
            "delete from records where id = (select max(id) from records join topics "
            "using (topic_id) where name = ? and key = ?)",
            (f"p.n.{topic}", group.encode()),
        )
        assert done.rowcount == 1
    db.close()


def test_status_stays_balanced_while_a_join_works(cli: Cli) -> None:
    """Reading upstream facts first must never show a trajectory nowhere."""
    done = threading.Event()
    codes: list[tuple[int, str]] = []

    def look() -> Iterator[None]:
        while not done.is_set():
            with cli.place() as place:
                balance = status_of(place.log, place.stage, anew=True).balance
                codes.append((len(balance.faults), str(balance.faults[:3])))
            yield

    watcher = threading.Thread(target=lambda: [None for _ in look()])
    watcher.start()
    try:
        with cli.place() as place:
            for g in range(0, 200, 20):
                batch = (trajectory(n, s) for n in range(g, g + 20) for s in (0, 1))
                append(place, "trajectories", *batch)
        join_everything(cli)
    finally:
        done.set()
        watcher.join(60)
    assert codes and {n for n, _ in codes} == {0}, codes
    assert cli.lines("status", "--json")[0]["pending"]["ready"] == 400


# --- explain


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("rows.0:1:a", "rows.0:1:a: trained by step 1 of branch main"),
        ("rows.0", "rows.0:0:a: trained by step 1 of branch main"),
        ("rows.1:0:a", "pending: an experience, not yet taken by the trainer"),
        ("rows.2:0:a", "pending: waits for rewards of human until"),
        ("rows.2:1:a", "rows.2:1:a: failed, decided by join: it broke"),
        ("rows.3:0:a", "pending: not yet read by the join"),
        ("global_step_1", "full checkpoint of step 1  /c/global_step_1"),
        ("/somewhere/global_step_1", "all of its training: 1 steps, 2 trajectories"),
    ],
)
def test_explain_tells_the_whole_path(wanted: str, told: str, small: Cli) -> None:
    code, out, err = small.run("explain", wanted)
    assert code == 0, err
    assert told in out


def test_explain_finds_a_reward_by_its_event_id(small: Cli) -> None:
    path = small.config.parent / "rewards.jsonl"
    path.write_text(json.dumps(REWARD))
    assert small.run("produce", "rewards", "--file", str(path))[0] == 0
    code, out, _ = small.run("explain", "r1")
    assert code == 0
    assert "rows.2:0:a  human 0.5  (r1)" in out
    assert "waits for rewards of human" in out


def test_explain_tells_a_reward_without_its_trajectory_from_an_unread_one(small: Cli) -> None:
    path = small.config.parent / "rewards.jsonl"
    path.write_text(json.dumps(REWARD | {"trajectory_id": "rows.77:0:a"}))
    assert small.run("produce", "rewards", "--file", str(path))[0] == 0
    code, out, _ = small.run("explain", "r1")
    assert code == 0
    assert "rows.77:0:a: no trajectory of this id is on the log" in out


@pytest.mark.parametrize("wanted", ["rows.99", "rows.0:1:b", "nothing", "global_step_7"])
def test_explain_says_when_nothing_has_the_id(wanted: str, small: Cli) -> None:
    code, _, err = small.run("explain", wanted)
    assert code == 1
    assert wanted.split("/")[-1] in err
