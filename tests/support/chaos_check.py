"""Whether what a join wrote is what its input says, whatever happened to it meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos_join import Place
from join_reference import Result, Step, Tick, reference

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import InvalidEvent, UndecodableRecord
from streamrft.schemas.topics import partition_for
from streamrft.streams.log import Record
from streamrft.streams.reading import begins, read_to_end
from streamrft.streams.settings import StreamSettings

SETTINGS = StreamSettings(grace_ms=0)
TIMED = ("expiring", "old")
SHOWN = 10


@dataclass
class Written:
    """Everything on the topics of a run."""

    inputs: dict[int, list[tuple[Record, ev.Event | None]]]
    clocks: dict[int, list[ev.Clock]]
    copies: dict[str, list[ev.Experience]]
    drops: list[ev.Drop]
    letters: list[ev.DeadLetter]

    @classmethod
    def on(cls, place: Place) -> Written:
        """Read it all."""

        def records(*topics: str) -> list[Record]:
            names = [place.topics.name(t) for t in topics]
            return list(read_to_end(place.log, begins(place.log, *names)))

        inputs: dict[int, list[tuple[Record, ev.Event | None]]] = defaultdict(list)
        for record in records("trajectories", "rewards"):
            inputs[record.partition].append((record, _event(record)))
        clocks: dict[int, list[ev.Clock]] = defaultdict(list)
        for record in records("clock"):
            clocks[record.partition].append(codec.decode(record.value, ev.Clock))
        copies: dict[str, list[ev.Experience]] = defaultdict(list)
        for record in records("experiences"):
            found = codec.decode(record.value, ev.Experience)
            copies[found.trajectory_id].append(found)
        drops = [codec.decode(r.value, ev.Drop) for r in records("drops")]
        letters = [codec.decode(r.value, ev.DeadLetter) for r in records("dead_letters")]
        return cls(inputs, clocks, copies, drops, letters)

    def steps(self, place: Place, partition: int) -> list[Step]:
        """What a partition read: between two clock events the order does not matter."""
        rest: dict[str, list[tuple[int, Step]]] = defaultdict(list)
        for record, event in self.inputs[partition]:
            if isinstance(event, ev.Trajectory | ev.Reward):
                rest[place.topics.short(record.topic)].append((record.offset, event))
        steps: list[Step] = []
        for clock in self.clocks[partition]:
            for topic, end in clock.positions.items():
                steps += [event for offset, event in rest[topic] if offset < end]
                rest[topic] = [(o, event) for o, event in rest[topic] if o >= end]
            steps.append(Tick(clock.time_ms))
        return steps + [event for topic in rest for _, event in rest[topic]]

    def of(self, topic: type[ev.Event]) -> int:
        """Records of the input that are such events."""
        return sum(isinstance(event, topic) for part in self.inputs.values() for _, event in part)

    @property
    def num_bad(self) -> int:
        """Records of the input that are no events."""
        return sum(event is None for part in self.inputs.values() for _, event in part)


def _event(record: Record) -> ev.Event | None:
    kind = ev.Trajectory if record.topic.endswith(".trajectories") else ev.Reward
    try:
        return codec.decode(record.value, kind)
    except (UndecodableRecord, InvalidEvent):
        return None


@dataclass
class Expected:
    """The reference over all partitions. `either`: experiences with two right contents."""

    result: Result = field(default_factory=Result)
    either: dict[str, tuple] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Place, written: Written) -> Expected:
        """Group by group, since its groups do not meet."""
        found = cls()
        for partition in range(place.topics.num_partitions):
            for group_id, steps in _by_group(written.steps(place, partition)):
                home = partition_for(group_id.encode(), place.topics.num_partitions)
                if home == partition:  # a stray reward comes again, on its own partition
                    found._add(group_id, steps)
        return found

    def _add(self, group_id: str, steps: list[Step]) -> None:
        given = steps
        if group_id.startswith("wavering"):
            is_late = [isinstance(s, ev.Reward) and s.revision > 0 for s in steps]
            late = [s for s, late in zip(steps, is_late, strict=True) if late]
            given = [s for s, late in zip(steps, is_late, strict=True) if not late]
            self.either |= reference([*late, *given], SETTINGS).experiences
        result = reference(given, SETTINGS)
        self.result.experiences |= result.experiences
        self.result.drops += result.drops


def _by_group(steps: list[Step]) -> Iterator[tuple[str, list[Step]]]:
    """Each group's own events; clock events between them where they matter."""
    groups: dict[str, list[tuple[int, Step]]] = defaultdict(list)
    ticks: list[tuple[int, Step]] = []
    for i, step in enumerate(steps):
        if isinstance(step, Tick):
            ticks.append((i, step))
        else:
            groups[ev.group_of(step.trajectory_id)].append((i, step))
    for group_id, own in groups.items():
        if group_id.startswith(TIMED):
            own = sorted([*own, *ticks], key=lambda found: found[0])
        yield group_id, [step for _, step in own]


def content(e: ev.Experience) -> tuple:
    """What an experience says, in the terms of the reference."""
    group = tuple((m.slot, m.trajectory_id, m.reward) for m in e.group)
    return e.reward, tuple(sorted(e.reward_parts.items())), group, e.group_experiences


def check(place: Place, said: dict[str, float], counters: dict[str, int]) -> Written:
    """Everything that must hold once a feed was joined to its end."""
    written = Written.on(place)
    _check_input(place, written, said)
    expected = Expected.of(place, written)
    _check_experiences(written, expected)
    found = Counter((d.trajectory_id, d.reason, d.group_experiences) for d in written.drops)
    invalid = {key: n for key, n in found.items() if key[1] == "invalid"}
    cut = {e.key.decode() for e, _ in _bad(written) if e.key and e.key.startswith(b"cut.")}
    assert {key[0].rsplit(":", 2)[0] for key in invalid} == cut
    assert set(invalid.values()) <= {1}
    found -= Counter(invalid)
    assert found == expected.result.drops, _difference(found, expected.result.drops)
    bad = Counter((r.topic, r.partition, r.offset) for r, _ in _bad(written))
    letters = Counter((d.topic, d.partition, d.offset) for d in written.letters)
    assert letters == bad, _difference(letters, bad)
    assert counters["trajectories"] == written.of(ev.Trajectory)
    assert counters["rewards"] == written.of(ev.Reward)
    assert counters["dead_letters"] == written.num_bad
    assert counters["open_groups"] == counters["pending"] == counters["early"] == 0
    return written


def _bad(written: Written) -> list[tuple[Record, None]]:
    return [(r, None) for part in written.inputs.values() for r, event in part if event is None]


def _check_input(place: Place, written: Written, said: dict[str, float]) -> None:
    """What was acknowledged to the feeder is on the log."""
    for topic in ("trajectories", "rewards"):
        name = place.topics.name(topic)
        values = {r.value for part in written.inputs.values() for r, _ in part if r.topic == name}
        assert len(values) == said[topic], f"{topic}: the log lost what it had acknowledged"


def _check_experiences(written: Written, expected: Expected) -> None:
    wanted = expected.result.experiences
    found = {name: content(copies[0]) for name, copies in written.copies.items()}
    missing, strange = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert not missing, f"{len(missing)} experiences missing: {missing[:SHOWN]}"
    assert not strange, f"{len(strange)} experiences too many: {strange[:SHOWN]}"
    different = [c for c in written.copies.values() if len({content(e) for e in c}) > 1]
    assert not different, f"one experience with two contents: {different[:1]}"
    twice = [name for name, copies in written.copies.items() if len(copies) > 1]
    assert not twice, f"{len(twice)} experiences came twice: {twice[:SHOWN]}"
    wrong = [
        (name, made, wanted[name])
        for name, made in found.items()
        if made not in (wanted[name], expected.either.get(name))
    ]
    assert not wrong, f"{len(wrong)} experiences are not as the reference has them: {wrong[:3]}"


def _difference(found: Counter, wanted: Counter) -> str:
    more, fewer = found - wanted, wanted - found
    return f"too many {list(more.items())[:SHOWN]}, missing {list(fewer.items())[:SHOWN]}"
