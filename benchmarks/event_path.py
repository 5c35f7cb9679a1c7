"""Trajectories a second through publish, join and batch-ready, beside plain SQL.

Three processes on one embedded log: a publisher that makes durable commits of 8 trajectories (a
group), the native join worker, and a reader that assembles groups for a batch. The limit is the
same rows, commits and processes in plain SQL, without codec or operators. Both are measured in
this run, interleaved.

    python benchmarks/event_path.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sqlite3
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from workers.rollouts import GROUP, sequence_of, trajectory

from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics
from streamrft.streams.log import Partition, open_log, topic_specs
from streamrft.streams.process import Process
from streamrft.streams.settings import StreamSettings

TOPICS = Topics("bench.path")
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Run:
    """One measured run: trajectories a second, and CPU seconds by process."""

    rate: float
    cpu_s: dict[str, float]


def rollout(number: int, slot: int, sequence: ev.Sequence) -> ev.Trajectory:
    """Its score is known."""
    scores = [ev.Score(source="accuracy", value=float(slot % 2))]
    return trajectory(number, slot, sequence, scores=scores, reward_sources={"accuracy": 1.0})


# --- the product -------------------------------------------------------------------------------


def publish(url: str, num: int, num_tokens: int, start: Any, cpu: Any) -> None:
    """Commits of one group."""
    producer, sequence = open_log(url).producer(), sequence_of(num_tokens)
    topic = TOPICS.name("trajectories")
    start.wait()
    begin = time.process_time()
    for number in range(num // GROUP):
        key = f"bench.{number}".encode()
        for slot in range(GROUP):
            producer.send(topic, codec.encode(rollout(number, slot, sequence)), key=key)
        producer.flush()
    cpu["publish"] = time.process_time() - begin


def join(url: str, start: Any, cpu: Any, stop: Any) -> None:
    """The native shell, as `streamrft join` runs it."""
    from streamrft.streams.worker import run_join

    process = Process(open_log(url), TOPICS, name="join-0", role="join")
    process.stop_on_signals()
    start.wait()
    begin = time.process_time()
    run_join(process, StreamSettings())
    cpu["join"] = time.process_time() - begin


def read_groups(url: str, num: int, start: Any, cpu: Any) -> None:
    """Decode experiences and their tokens until every group is whole."""
    topic = TOPICS.name("experiences")
    consumer = open_log(url).consumer()
    consumer.assign({Partition(topic, p): 0 for p in range(TOPICS.partitions("experiences"))})
    groups: dict[str, int] = {}
    whole = 0
    start.wait()
    begin, deadline = time.process_time(), time.monotonic() + DEADLINE_S
    while whole < num // GROUP:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{whole} of {num // GROUP} groups after {DEADLINE_S:g} s")
        for record in consumer.poll(500, 1000):
            experience = codec.decode(record.value or b"", ev.Experience)
            found = codec.decode(experience.trajectory, ev.Trajectory)
            arrays.ints(found.sequences[0].tokens)
            count = groups.get(experience.group_id, 0) + 1
            groups[experience.group_id] = count
            whole += count == experience.group_experiences
    cpu["read"] = time.process_time() - begin


def product(num: int, num_tokens: int) -> Run:
    """One run through the embedded log."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/log.db"
        log = open_log(url)
        log.ensure_topics(topic_specs(TOPICS))
        log.close()
        return race(
            {
                "publish": (publish, (url, num, num_tokens)),
                "read": (read_groups, (url, num)),
            },
            {"join": (join, (url,))},
            num,
        )


# --- the limit: the same rows, commits and processes in plain SQL --------------------------------


def connect(path: str) -> sqlite3.Connection:
    """Durable commits, as the embedded log makes them."""
    db = sqlite3.connect(path, isolation_level=None, timeout=30)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    return db


def append(db: sqlite3.Connection, topic: int, rows: list[tuple[bytes, bytes]]) -> None:
    """Rows at the end of a topic's one partition."""
    (end,) = db.execute("SELECT next FROM ends WHERE topic=?", (topic,)).fetchone()
    db.executemany(
        "INSERT INTO records(topic, part, off, ts, key, value) VALUES(?,0,?,?,?,?)",
        [(topic, end + i, 0, key, value) for i, (key, value) in enumerate(rows)],
    )
    db.execute("UPDATE ends SET next=? WHERE topic=?", (end + len(rows), topic))


def fetch(db: sqlite3.Connection, topic: int, offset: int) -> list[tuple[bytes, bytes]]:
    """At most 500 rows from an offset on."""
    return db.execute(
        "SELECT key, value FROM records WHERE topic=? AND part=0 AND off>=? ORDER BY off LIMIT 500",
        (topic, offset),
    ).fetchall()


def sql_write(path: str, num: int, value: bytes, start: Any, cpu: Any) -> None:
    """The publisher's rows."""
    db = connect(path)
    start.wait()
    begin = time.process_time()
    for number in range(num // GROUP):
        key = b"bench.%d" % number
        db.execute("BEGIN IMMEDIATE")
        append(db, 0, [(key, value)] * GROUP)
        db.execute("COMMIT")
    cpu["publish"] = time.process_time() - begin


def sql_join(path: str, num: int, value: bytes, start: Any, cpu: Any) -> None:
    """The join's rows: an experience a trajectory, a state a group, the position; one commit."""
    db, position = connect(path), 0
    start.wait()
    begin = time.process_time()
    while position < num:
        rows = fetch(db, 0, position)
        if not rows:
            time.sleep(0.002)
            continue
        position += len(rows)
        db.execute("BEGIN IMMEDIATE")
        append(db, 1, [(key, value) for key, _ in rows])
        append(db, 2, [(key, b"x" * 64) for key, _ in rows[::GROUP]])
        db.execute("UPDATE ends SET next=? WHERE topic=3", (position,))
        db.execute("COMMIT")
    cpu["join"] = time.process_time() - begin


def sql_read(path: str, num: int, start: Any, cpu: Any) -> None:
    """The reader's rows."""
    db, position = connect(path), 0
    start.wait()
    begin = time.process_time()
    while position < num:
        rows = fetch(db, 1, position)
        position += len(rows)
        if not rows:
            time.sleep(0.002)
    cpu["read"] = time.process_time() - begin


def limit(num: int, num_tokens: int) -> Run:
    """The same bytes without codec and operators."""
    value = codec.encode(rollout(0, 0, sequence_of(num_tokens)))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/plain.db"
        db = connect(path)
        db.execute(
            "CREATE TABLE records(id INTEGER PRIMARY KEY, topic INT, part INT, off INT, ts INT, "
            "key BLOB, value BLOB, headers BLOB, UNIQUE(topic, part, off))"
        )
        db.execute("CREATE TABLE ends(topic INT PRIMARY KEY, next INT)")
        db.executemany("INSERT INTO ends VALUES(?, 0)", [(t,) for t in range(4)])
        db.close()
        return race(
            {
                "publish": (sql_write, (path, num, value)),
                "join": (sql_join, (path, num, value + b"e" * 300)),
                "read": (sql_read, (path, num)),
            },
            {},
            num,
        )


# --- measuring -----------------------------------------------------------------------------------


def race(ending: dict[str, Any], endless: dict[str, Any], num: int) -> Run:
    """Start all processes together; the time runs until the ending ones are done."""
    context = mp.get_context("fork")
    with context.Manager() as manager:
        cpu, stop = manager.dict(), context.Event()
        start = context.Barrier(len(ending) + len(endless) + 1)
        first = [context.Process(target=f, args=(*a, start, cpu)) for f, a in ending.values()]
        rest = [context.Process(target=f, args=(*a, start, cpu, stop)) for f, a in endless.values()]
        for process in first + rest:
            process.start()
        start.wait()
        begin = time.monotonic()
        for process in first:
            process.join(DEADLINE_S)
        wall = time.monotonic() - begin
        for process in rest:
            process.terminate()
            process.join(30)
        if any(process.exitcode for process in first):
            raise SystemExit("a benchmark process failed; see above")
        return Run(num / wall, dict(cpu))


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", action="store_true", help="print one object: name -> value")
    args = parser.parse_args()
    num, repeats = (8_000, 1) if args.quick else (40_000, 3)
    found: dict[str, float] = {}
    for num_tokens in (200, 1_000):
        pairs = [(product(num, num_tokens), limit(num, num_tokens)) for _ in range(repeats)]
        name = f"{num_tokens}_tokens"
        found[f"{name}/product_per_s"] = statistics.median(a.rate for a, _ in pairs)
        found[f"{name}/plain_sql_per_s"] = statistics.median(b.rate for _, b in pairs)
        found[f"{name}/ratio"] = statistics.median(a.rate / b.rate for a, b in pairs)
        for role in ("publish", "join", "read"):
            for kind, runs in (
                ("product", [a for a, _ in pairs]),
                ("plain_sql", [b for _, b in pairs]),
            ):
                spent = statistics.median(r.cpu_s.get(role, float("nan")) for r in runs)
                found[f"{name}/{kind}_{role}_cpu_us"] = spent / num * 1e6
    if args.json:
        print(json.dumps(found))
        return
    print(f"{num:,} trajectories a run, {repeats} runs, {os.cpu_count()} cores; commits of {GROUP}")
    for key, value in found.items():
        print(f"{key:45} {value:12,.2f}")
    print(f"event size at 200 tokens: {len(codec.encode(rollout(0, 0, sequence_of(200)))):,} bytes")


if __name__ == "__main__":
    main()
