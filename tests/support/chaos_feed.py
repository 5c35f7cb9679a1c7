"""What a chaos test feeds to the join, and the process that feeds it.

Every group is of one kind, which its id begins with, and every kind but `wavering` has one outcome
whatever the order in which a join reads the two topics. `python chaos_feed.py FEED` is the feeder:
it sends at a steady rate until all is sent or it is told to begin no more groups, and at the end
says what it sent.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

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
SPREAD_S, EARLY_S = 1.5, 0.3
HOUR_MS = 3_600_000
SEQUENCE = sequence()
GARBAGE = (b"", b"\xc3\x01 cut", b"{not json", b'{"event_id": 1}', b"\x00" * 50, None)


class Entry(NamedTuple):
    """One record of the feed, due so many seconds from the feed's begin."""

    due_s: float
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
    rate: int
    begins_ms: int = field(default_factory=now_ms)
    options: Mapping[str, str] = field(default_factory=dict)

    def entries(self, is_enough: Callable[[], bool]) -> Iterator[Entry]:
        """Everything, in the order of sending; no group begins once it is enough."""
        made: list[tuple[float, int, Entry]] = []
        for number, (begin_s, group) in enumerate(self._groups()):
            while made and made[0][0] < begin_s - EARLY_S:
                yield heapq.heappop(made)[-1]
            if is_enough():
                break
            for i, entry in enumerate(group):
                heapq.heappush(made, (entry.due_s, 100 * number + i, entry))
        while made:
            yield heapq.heappop(made)[-1]

    def _groups(self) -> Iterator[tuple[float, list[Entry]]]:
        """When each group begins, and what it has; the same for the same fields."""
        rng = random.Random(self.seed)
        num_entries = number = 0
        while num_entries < self.seconds * self.rate:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            begin_s = num_entries / self.rate
            group = list(_group(rng, kind, number, self.begins_ms + int(begin_s * 1000)))
            group += [(at + rng.uniform(0, SPREAD_S), e) for at, e in group if rng.random() < 0.05]
            yield begin_s, [_entry(begin_s + at, event) for at, event in group]
            num_entries += len(group)
            number += 1


def _entry(due_s: float, event: ev.Event | Entry) -> Entry:
    if isinstance(event, Entry):
        return event._replace(due_s=due_s)
    topic = "trajectories" if isinstance(event, ev.Trajectory) else "rewards"
    return Entry(due_s, topic, key_of(event, topic), codec.encode(event))


def _group(
    rng: random.Random, kind: str, number: int, at: int
) -> Iterator[tuple[float, ev.Event | Entry]]:
    """Events of one group, each with its delay in seconds."""
    group_id = f"{kind}.{number}"
    if kind == "poison":
        topic = rng.choice(("trajectories", "rewards"))
        key = rng.choice((None, group_id.encode()))
        yield 0.0, Entry(0.0, topic, key, rng.choice(GARBAGE))
        return
    if kind == "cut":
        whole = codec.encode(_rollout(f"{group_id}:0:a", 1, number, at))
        yield 0.0, Entry(0.0, "trajectories", group_id.encode(), whole[:-3])
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
        yield styled, Entry(0.0, "rewards", None, codec.encode(style))
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
        """It has started."""
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
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


class Sending:
    """What was sent until no more groups began, in how long; all records, all values by topic."""

    def __init__(self, feed: Feed) -> None:
        self._begin = time.monotonic()
        self._is_enough = False
        self._sent, self._num_records, self._seconds = 0, 0, 0.0
        self._values: dict[str, set[bytes | None]] = defaultdict(set)
        self._entries = feed.entries(lambda: self._is_enough)
        self._next = next(self._entries, None)

    def go_on(self, producer: Producer, topics: Topics) -> bool:
        """Send what is due, after a look whether standard input says that it is enough."""
        now = time.monotonic() - self._begin
        told = not self._is_enough and bool(select.select([sys.stdin], [], [], 0)[0])
        num = 0
        while self._next is not None and self._next.due_s <= now:
            _, topic, key, value = self._next
            producer.send(topics.name(topic), value, key=key)
            self._values[topic].add(value)
            self._next, num = next(self._entries, None), num + 1
        flush(producer)
        self._num_records += num
        if not self._is_enough:
            self._sent, self._seconds = self._sent + num, time.monotonic() - self._begin
        self._is_enough |= told
        time.sleep(max(0.0, 0.05 - (time.monotonic() - self._begin - now)))
        return self._next is not None

    def said(self) -> dict[str, float]:
        """For whoever reads it."""
        distinct = {topic: len(values) for topic, values in self._values.items()}
        times = {"sent": self._sent, "seconds": self._seconds}
        return {**times, "records": self._num_records, **distinct}


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
    log = open_log(feed.url, Limits(options=feed.options))
    producer, topics = log.producer(), Topics(feed.namespace)
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    sending = Sending(feed)
    while sending.go_on(producer, topics):
        pass
    print(json.dumps(sending.said()), flush=True)
    log.close()


if __name__ == "__main__":
    main()
