"""Every trajectory ends in exactly one state: a pure fold over the topics that proves it.

Events are given in any order. A trajectory is pending while it is past the join's positions, in
the join's open state, or an experience not yet taken; each is counted by itself, so that one that
is nowhere shows. What is settled is kept as a hash, so that a second end is found later too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from ...schemas import events as ev
from ...streams.lineage import Lineage
from ...streams.log import Position

TRAINED = "trained"
STATES = (TRAINED, *ev.DROP_REASONS)
_PENDING = ("unjoined", "open", "ready")
_FORGOTTEN, _REFUSED = "forgotten", "refused"
_LOST, _NO_EXPERIENCE = "lost: ", "but it never was an experience"


class Entry(msgspec.Struct, array_like=True, gc=False):
    """What is known of one trajectory that is not settled.

    `offset` and `taken_offset`: of its record and of its experience, -1 before they are read.
    `ends`: final states, such as "trained by main/3" or "stale by trainer", each once. `weak`:
    ends at the very step of a fork, which the branch after it judges again.
    """

    partition: int = -1
    offset: int = -1
    taken_offset: int = -1
    ends: list[str] = []
    weak: list[str] = []

    @property
    def is_experience(self) -> bool:
        """Whether its experience was read."""
        return self.taken_offset >= 0


class Books(msgspec.Struct):
    """The fold as plain data: what is open, what is settled, and the counts.

    `missed`: partitions by topic of which retention deleted records before they were read.
    `unreadable`: offsets of `trajectories` that are no events and wait for their dead letter;
    `told`: offsets of dead letters that were read before their record.
    """

    branch: str = "main"
    open: dict[str, Entry] = {}
    settled: dict[int, int] = {}
    states: dict[str, int] = {}
    num_repeats: int = 0
    num_amended: int = 0
    num_dead_letters: int = 0
    unreadable: dict[str, list[int]] = {}
    told: dict[str, set[int]] = {}
    faults: list[str] = []
    cuts: dict[str, int] = {}
    missed: dict[str, list[int]] = {}

    @property
    def num_settled(self) -> int:
        """Trajectories with their end, each counted once by its id."""
        return len(self.settled)


@dataclass(frozen=True)
class Pending:
    """Trajectories without an end, by where they are."""

    unjoined: int = 0
    open: int = 0
    ready: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.unjoined + self.open + self.ready


@dataclass(frozen=True)
class Balance:
    """What the books say: `produced` is counted from the trajectories alone.

    `num_forgotten`: retention deleted the drop or the cut that told their end.
    """

    produced: int
    states: Mapping[str, int]
    pending: Pending
    num_repeats: int
    num_amended: int
    num_dead_letters: int
    faults: tuple[str, ...]
    reward_counts: Mapping[str, int] = field(default_factory=dict)
    num_forgotten: int = 0

    @property
    def is_balanced(self) -> bool:
        """Whether every trajectory has exactly one state, and produced = ended + pending."""
        told = sum(self.states.values()) + self.pending.total + self.num_forgotten
        return not self.faults and self.produced == told


class Ledger:
    """Fold events of one stage into books; `balance` judges them."""

    def __init__(self, lineage: Lineage, books: Books | None = None) -> None:
        self.books = books or Books(branch=lineage.branch)
        self._lineage = lineage
        assert self.books.branch == lineage.branch, "books of another branch are counted anew"

    def on_trajectory(self, trajectory_id: str, at: Position) -> None:
        """A record of `trajectories`; its id again is a repeat, unless it replays a dead letter."""
        entry = self._entry(trajectory_id)
        if entry is None or (entry.offset >= 0 and not self._has_letter(entry)):
            self.books.num_repeats += 1
            return
        entry.partition, entry.offset = at.partition, at.offset
        self._settle(trajectory_id, entry)

    def on_unreadable(self, at: Position) -> None:
        """A record of `trajectories` that is no event: only a dead letter tells of it."""
        told = self.books.told.get(str(at.partition), set())
        if at.offset in told:
            told.remove(at.offset)
        else:
            self.books.unreadable.setdefault(str(at.partition), []).append(at.offset)

    def on_experience(self, experience: ev.Experience, offset: int) -> None:
        """A record of `experiences`; an amendment changes no state."""
        if experience.reward_revision:
            self.books.num_amended += 1
            return
        entry = self._entry(experience.trajectory_id)
        if entry is None or entry.is_experience:
            self.books.num_repeats += 1
            return
        entry.taken_offset = offset
        self._settle(experience.trajectory_id, entry)

    def on_drop(self, drop: ev.Drop) -> None:
        """A record of `drops`. The trainer's count on the lineage only."""
        by_trainer = drop.where == "trainer"
        if by_trainer and not self._lineage.contains(drop.branch, drop.step):
            return
        at_fork = by_trainer and drop.step == self._lineage.last_step(drop.branch)
        self._end(drop.trajectory_id, f"{drop.reason} by {drop.where}", is_weak=at_fork)

    def on_cut(self, cut: ev.Cut) -> None:
        """A cut on the lineage; its members are trained."""
        name = f"{cut.branch}/{cut.step}"
        if not self._lineage.contains(cut.branch, cut.step) or name in self.books.cuts:
            return
        self.books.cuts[name] = len(self.books.cuts)
        for member in cut.members:
            self._end(member.trajectory_id, f"{TRAINED} by {name}")

    def on_missed(self, topic: str, partition: int) -> None:
        """Retention deleted records of a partition that were not read."""
        missed = self.books.missed.setdefault(topic, [])
        if partition not in missed:
            missed.append(partition)

    def on_dead_letter(self, letter: ev.DeadLetter, *, of_trajectories: bool) -> None:
        """A record of `dead_letters`."""
        self.books.num_dead_letters += 1
        if not of_trajectories:
            return
        offsets = self.books.unreadable.get(str(letter.partition), [])
        if letter.offset in offsets:
            offsets.remove(letter.offset)
        else:
            self.books.told.setdefault(str(letter.partition), set()).add(letter.offset)

    def balance(
        self,
        joined: Mapping[int, int],
        in_state: Collection[str],
        first_kept: Mapping[int, int],
        reward_counts: Mapping[str, int],
        finished: Mapping[int, int],
    ) -> Balance:
        """Judge the books.

        Args:
            joined: the join's committed next offset of each partition of `trajectories`.
            finished: offset in each partition of `experiences` below which, as the trainer
                committed, all have their end; nothing where a fork makes it judge again.
            in_state: trajectory ids that the join's open state holds without an end.
            first_kept: first offset that retention left in each partition of `trajectories`.
            reward_counts: rewards by outcome, as the join counted them.
        """
        books, found = self.books, Counter(self.books.states)
        faults = [*books.faults, *self._unread(joined)]
        for trajectory_id, entry in books.open.items():
            place = _place_of(trajectory_id, entry, joined, in_state, finished)
            place = self._forgiven(place, entry)
            found[place] += 1
            is_known = place in (*STATES, *_PENDING, _FORGOTTEN, _REFUSED)
            if not is_known and (entry.offset >= 0 or not any(first_kept.values())):
                faults.append(f"{trajectory_id}: {place}")
        return self._balance(found, reward_counts, faults)

    def _balance(
        self, found: Counter[str], reward_counts: Mapping[str, int], faults: list[str]
    ) -> Balance:
        """The books as counted; `found` is how many trajectories are in each place."""
        books = self.books
        return Balance(
            books.num_settled + len(self._produced_and_open()) - found[_REFUSED],
            {state: found[state] for state in STATES},
            Pending(*(found[place] for place in _PENDING)),
            books.num_repeats,
            books.num_amended,
            books.num_dead_letters,
            tuple(faults),
            dict(reward_counts),
            found[_FORGOTTEN],
        )

    def _forgiven(self, place: str, entry: Entry) -> str:
        """What seems wrong only for want of a record, which was refused or deleted by retention."""
        missed = self.books.missed
        if self._has_letter(entry) and place.startswith(_LOST) and not entry.is_experience:
            return _REFUSED
        if place.endswith(_NO_EXPERIENCE) and entry.partition in missed.get("experiences", ()):
            return state_of(place)
        if not place.startswith(_LOST):
            return place
        if entry.partition in missed.get("drops", ()) or missed.get("train_steps"):
            return _FORGOTTEN
        if entry.partition in missed.get("experiences", ()) and not entry.is_experience:
            return "its experience was deleted by retention before it was trained on"
        return place

    def _has_letter(self, entry: Entry) -> bool:
        """Whether its record was refused, though it can be read: by us, or by now."""
        return entry.offset in self.books.told.get(str(entry.partition), ())

    def _produced_and_open(self) -> list[str]:
        """Open ids whose record was read, or refused as unreadable with its id."""
        return [
            trajectory_id
            for trajectory_id, entry in self.books.open.items()
            if entry.offset >= 0 or _is_refused(entry)
        ]

    def _entry(self, trajectory_id: str) -> Entry | None:
        """The open entry, made when it is new; None when the trajectory is settled."""
        entry = self.books.open.get(trajectory_id)
        if entry is None and hash_of(trajectory_id) not in self.books.settled:
            entry = self.books.open[trajectory_id] = Entry()
        return entry

    def _end(self, trajectory_id: str, end: str, *, is_weak: bool = False) -> None:
        entry = self._entry(trajectory_id)
        if entry is None:
            self._end_again(trajectory_id, end, is_weak)
            return
        ends = entry.weak if is_weak else entry.ends
        if end in ends:
            self.books.num_repeats += 1
            return
        ends.append(end)
        self._settle(trajectory_id, entry)

    def _end_again(self, trajectory_id: str, end: str, is_weak: bool) -> None:
        before = STATES[self.books.settled[hash_of(trajectory_id)]]
        if state_of(end) == before and before != TRAINED:
            self.books.num_repeats += 1
        elif not is_weak:
            self.books.faults.append(f"{trajectory_id}: ended twice, {before} and then {end}")

    def _settle(self, trajectory_id: str, entry: Entry) -> None:
        """Close the entry once everything that its end needs was read."""
        if len(entry.ends) != 1 or not _has_all(entry):
            return
        state = state_of(entry.ends[0])
        self.books.states[state] = self.books.states.get(state, 0) + 1
        self.books.settled[hash_of(trajectory_id)] = STATES.index(state)
        del self.books.open[trajectory_id]

    def _unread(self, joined: Mapping[int, int]) -> list[str]:
        return [
            f"trajectories[{partition}]@{offset}: no event and no dead letter"
            for partition, offsets in self.books.unreadable.items()
            for offset in offsets
            if offset < joined.get(int(partition), 0)
        ]


def hash_of(trajectory_id: str) -> int:
    """64 bits that stand for a settled id."""
    return int.from_bytes(hashlib.blake2b(trajectory_id.encode(), digest_size=8).digest(), "little")


def state_of(end: str) -> str:
    """`stale by trainer` -> `stale`."""
    return end.partition(" ")[0]


def _has_all(entry: Entry) -> bool:
    """Whether trajectory and, where its end needs one, experience were read."""
    needs_experience = state_of(entry.ends[0]) == TRAINED or entry.ends[0].endswith(" by trainer")
    return entry.offset >= 0 and entry.is_experience == needs_experience


def _is_refused(entry: Entry) -> bool:
    """Whether the record was refused, its id still readable, so that nobody has the event."""
    return entry.offset < 0 and not entry.is_experience and _states(entry) == ["invalid"]


def _states(entry: Entry) -> list[str]:
    return [state_of(end) for end in entry.ends or entry.weak]


def _place_of(
    trajectory_id: str,
    entry: Entry,
    joined: Mapping[int, int],
    in_state: Collection[str],
    finished: Mapping[int, int],
) -> str:
    """Where it is pending, its state where that was not certain before, or what is wrong."""
    ends = entry.ends or entry.weak
    if _is_refused(entry):
        return "invalid"
    if entry.offset < 0:
        seen = [*ends, *(["an experience"] if entry.is_experience else [])]
        return f"{' and '.join(seen)}, but no such trajectory"
    if len(entry.ends) > 1:
        return f"ended twice, {' and '.join(ends)}"
    if ends and not entry.is_experience:
        return f"{ends[0]}, {_NO_EXPERIENCE}"
    if ends:
        return state_of(ends[0]) if not entry.ends else f"{ends[0]}, but it is an experience too"
    if entry.is_experience:
        if entry.taken_offset >= finished.get(entry.partition, 0):
            return "ready"
        where = f"experiences[{entry.partition}]@{entry.taken_offset}"
        return f"{_LOST}the trainer is done with it ({where}), no end"
    if entry.offset >= joined.get(entry.partition, 0):
        return "unjoined"
    if trajectory_id in in_state:
        return "open"
    return f"{_LOST}read by the join (trajectories[{entry.partition}]@{entry.offset}), no end"
