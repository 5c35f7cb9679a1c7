"""What a chaos test feeds to the join, and the process that feeds it.

Every group is of one kind, which its id begins with, and every kind but `wavering` has one outcome
whatever the order in which a join reads the two topics. `python chaos_feed.py FEED` is the feeder:
it encodes everything first, then sends at a steady rate until all is sent or it is told to begin no
more groups, and at the end says what it sent.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from join_scripts import failed, rew, sequence, traj

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import LogUnavailable
from streamrft.schemas.events import now_ms
from streamrft.schemas.topics import Topics, key_of
from streamrft.streams.log import Limits, Producer, open_log

SOURCES = {"judge": 1.0, "style": 0.5}
KINDS = {
    "plain": 80, "corrected": 5, "wavering": 3, "failed": 3, "doubled": 3, "expiring": 2, "old": 1,
    "astray": 1, "poison": 1, "cut": 1,
}  # fmt: skip
SPREAD_S = 1.5
HOUR_MS = 3_600_000
SEQUENCE = sequence()
GARBAGE = (b"", b"\xc3\x01 cut", b"{not json", b'{"event_id": 1}', b"\x00" * 50, None)


class Entry(NamedTuple):
    """One record of the feed: when it and its group are due, in seconds from the feed's begin."""

    due_s: float
    group_s: float
    topic: str
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class Feed:
    """`rate` events a second for `seconds`, about a twentieth of them repeats."""

    url: str
    namespace: str
    seed: int
    seconds: float
    rate: int = 3_600
    begins_ms: int = field(default_factory=now_ms)
    options: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Everything, in the order of sending; the same for the same fields."""
        rng = random.Random(self.seed)
        entries: list[Entry] = []
        number = 0
        while len(entries) < self.seconds * self.rate:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            begin_s = len(entries) / self.rate
            group = list(_group(rng, kind, number, self.begins_ms + int(begin_s * 1000)))
            group += [(at + rng.uniform(0, SPREAD_S), e) for at, e in group if rng.random() < 0.05]
            entries += [_entry(begin_s + at, begin_s, event) for at, event in group]
            number += 1
        return sorted(entries, key=lambda e: e.due_s)


def _entry(due_s: float, group_s: float, event: ev.Event | Entry) -> Entry:
    if isinstance(event, Entry):
        return event._replace(due_s=due_s, group_s=group_s)
    topic = "trajectories" if isinstance(event, ev.Trajectory) else "rewards"
    return Entry(due_s, group_s, topic, key_of(event, topic), codec.encode(event))


def _group(
    rng: random.Random, kind: str, number: int, at: int
) -> Iterator[tuple[float, ev.Event | Entry]]:
    """Events of one group, each with its delay in seconds."""
    group_id = f"{kind}.{number}"
    if kind == "poison":
        topic = rng.choice(("trajectories", "rewards"))
        key = rng.choice((None, group_id.encode()))
        yield 0.0, Entry(0.0, 0.0, topic, key, rng.choice(GARBAGE))
        return
    if kind == "cut":
        whole = codec.encode(_rollout(f"{group_id}:0:a", 1, number, at))
        yield 0.0, Entry(0.0, 0.0, "trajectories", group_id.encode(), whole[:-3])
        return
    size = rng.choice((1, 2, 2, 3, 4))
    late = at - 2 * HOUR_MS if kind == "old" else at
    for slot in range(size):
        name = f"{group_id}:{slot}:a"
        begin = rng.uniform(0, SPREAD_S / 2)
        fate = {"reward_deadline_ms": 2_000} if kind == "expiring" else {}
        if kind == "failed" and not slot:
            yield begin, failed(name, size=size, at=at, number=number)
        else:
            yield begin, _rollout(name, size, number, late, **fate)
        if kind == "doubled" and not slot:
            yield begin + 0.01, _rollout(f"{group_id}:0:b", size, number, at)
        yield from _rewards(rng, kind, name, at, begin)


def _rollout(name: str, size: int, number: int, at: int, **fields: int) -> ev.Trajectory:
    known = dict(number=number, reward_sources=SOURCES, sequences=[SEQUENCE])
    return traj(name, size=size, at=at, **(known | fields))


def _rewards(
    rng: random.Random, kind: str, name: str, at: int, begin: float
) -> Iterator[tuple[float, ev.Event | Entry]]:
    """Scores of one slot; a quarter come before their trajectory."""
    judged = begin + rng.uniform(-0.25, 0.75) * SPREAD_S / 2
    styled = begin + rng.uniform(-0.25, 0.75) * SPREAD_S / 2
    if kind == "corrected":
        styled = max(styled, judged + 0.02)
        yield judged + 0.01, rew(name, rng.random(), revision=1, at=at)
    elif kind == "wavering" and name.endswith(":0:a"):
        yield max(judged, styled) + SPREAD_S / 2, rew(name, rng.random(), revision=1, at=at)
    yield judged, rew(name, rng.random(), at=at)
    if kind == "expiring" and name.endswith(":0:a"):
        return
    style = rew(name, rng.random(), source="style", at=at)
    if kind == "astray":
        yield styled, Entry(0.0, 0.0, "rewards", None, codec.encode(style))
    else:
        yield styled, style


class Feeder:
    """The feeding process. starting -> sending -> done"""

    def __init__(self, feed: Feed, folder: Path) -> None:
        with (folder / "feeder.log").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(asdict(feed))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = folder / "feeder.log"

    def await_ready(self) -> None:
        """Everything is encoded."""
        assert self._line() == {"ready": True}, self._log.read_text()

    def begin(self) -> None:
        """Send."""
        self._tell()

    def end(self) -> None:
        """Begin no more groups; those that were begun are sent whole."""
        assert self.process.poll() is None, "the feed ended before it was told to"
        self._tell()

    def _tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    @property
    def is_done(self) -> bool:
        """Whether everything was acknowledged; fails when the feeder did."""
        code = self.process.poll()
        assert code in (None, 0), f"the feeder ended with {code}: {self._log.read_text()[-2000:]}"
        return code == 0

    def said(self) -> dict[str, float]:
        """What it sent, once it is done."""
        return self._line()

    def _line(self) -> dict[str, float]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline() or "{}")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


def send(feed: Feed, entries: list[Entry], out: IO[str]) -> None:
    """Send what is due, every 50 ms, until all is sent or standard input says that it is enough."""
    log = open_log(feed.url, Limits(options=feed.options))
    producer, topics = log.producer(), Topics(feed.namespace)
    begin, at, is_enough = time.monotonic(), 0, False
    while at < len(entries):
        now = time.monotonic() - begin
        if not is_enough and select.select([sys.stdin], [], [], 0)[0]:
            # rewards may be due before their group is: all that could have one are sent whole
            is_enough, last_s = True, now + SPREAD_S
            entries = entries[:at] + [e for e in entries[at:] if e.group_s <= last_s]
        while at < len(entries) and entries[at].due_s <= now:
            _, _, topic, key, value = entries[at]
            producer.send(topics.name(topic), value, key=key)
            at += 1
        flush(producer)
        time.sleep(max(0.0, 0.05 - (time.monotonic() - begin - now)))
    seconds = time.monotonic() - begin
    kinds = ("trajectories", "rewards")
    distinct = {t: len({e.value for e in entries if e.topic == t}) for t in kinds}
    print(json.dumps({"sent": len(entries), "seconds": seconds, **distinct}), file=out, flush=True)
    log.close()


def flush(producer: Producer) -> None:
    """Until it is acknowledged; a broker may be away for a while."""
    deadline = time.monotonic() + 120
    while True:
        try:
            producer.flush()
            return
        except LogUnavailable:
            if time.monotonic() > deadline:
                raise


def main() -> None:
    feed = Feed(**json.loads(sys.argv[1]))
    entries = feed.entries()
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    send(feed, entries, sys.stdout)


if __name__ == "__main__":
    main()
