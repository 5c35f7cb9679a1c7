"""What the join remembers of a group: plain values, positions instead of payloads, and msgpack.

A snapshot is the msgpack array of a `Group`, about 500 bytes for eight members.
"""

from __future__ import annotations

import msgspec

from ...schemas.errors import InvalidEvent
from ...schemas.events import Reward, Score, Span, Trajectory

Spans = tuple[tuple[int, int, int, float], ...]

LIVE, FAILED, INVALID = 0, 1, 2
NO_TIME = -1
MAX_DETAIL = 1_000


class Standing(msgspec.Struct, array_like=True, gc=False):
    """The reward of one source that stands for one trajectory.

    `spans`: (sequence, start, end, value) for every score about a range of tokens.
    `event_id` is empty when the score travelled in the trajectory's record.
    """

    value: float
    time_ms: int
    revision: int = 0
    event_id: str = ""
    spans: Spans = ()


class Member(msgspec.Struct, array_like=True, gc=False):
    """The trajectory that holds a slot.

    `scores` lie in the order of `sources`: None is missing, a bare number came in the record
    without a span. `num_missing`: sources that have not scored it. `lengths`: tokens a sequence.
    An INVALID one holds its slot only until `deadline_ms`: a valid attempt can still take it.
    """

    offset: int
    time_ms: int
    deadline_ms: int | None
    state: int
    num_missing: int
    lengths: tuple[int, ...]
    sources: dict[str, float]
    scores: list[float | Standing | None]
    detail: str = ""

    @property
    def missing(self) -> list[str]:
        """Sources that have not scored it."""
        scored = zip(self.sources, self.scores, strict=False)
        return [source for source, score in scored if score is None]

    def standing(self, source: str) -> Standing | None:
        """What stands for one of its sources."""
        return self._full(self.scores[self._place(source)])

    def standings(self) -> list[Standing | None]:
        """What stands for each of its sources, in their order."""
        return [self._full(score) for score in self.scores]

    def stand(self, source: str, standing: Standing) -> None:
        """Let a reward stand for one of its sources."""
        place = self._place(source)
        self.num_missing -= self.scores[place] is None
        self.scores[place] = standing

    def _place(self, source: str) -> int:
        return next(i for i, name in enumerate(self.sources) if name == source)

    def _full(self, score: float | Standing | None) -> Standing | None:
        if score is None or isinstance(score, Standing):
            return score
        return Standing(score, self.time_ms)


class Early(msgspec.Struct, array_like=True, gc=False):
    """A reward kept until its trajectory comes, or until the close in `Group.after`."""

    trajectory_id: str
    source: str
    keep_until_ms: int
    reward: Standing


class Group(msgspec.Struct, array_like=True, gc=False):
    """One group. `size` 0: no trajectory yet, only rewards or refused ids.

    unopened -> open -> closed -> forgotten

    `holders`: slot -> attempt, kept after the close. `members` are kept after it only to amend.
    `dropped`: "slot:attempt" of what ended without holding a slot, so that a repeat is one.
    `withheld`: slot of a failed member whose drop waits for the close, -1 for none: it says that
    the group emitted nothing when nobody else is left to say so.
    `seen`: event ids of the rewards that stood at the close, so that a repeat is one.
    `time_ms`: newest time of its trajectories and counted rewards; `forget_at_ms`: stream time
    that ends a memory. `late_until_ms`: no trajectory this old may join, since an earlier life of
    the group, forgotten by now, may have had it.
    """

    group_id: str
    size: int = 0
    number: int = -1
    holders: dict[int, str] = {}
    members: dict[int, Member] = {}
    num_waiting: int = 0
    fill_by_ms: int | None = None
    is_timed: bool = False
    time_ms: int = NO_TIME
    early: list[Early] = []
    after: list[Early] = []
    dropped: list[str] = []
    withheld: int = -1
    is_closed: bool = False
    seen: list[str] = []
    forget_at_ms: int | None = None
    late_until_ms: int = NO_TIME
    revision: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it waits for trajectories or rewards."""
        return self.size > 0 and not self.is_closed

    @property
    def has_living(self) -> bool:
        """Whether a member exists that will end as an experience or a drop at the close."""
        return any(m.state == LIVE for m in self.members.values())

    @property
    def has_valid(self) -> bool:
        """Whether a trajectory that was not refused holds a slot."""
        return any(m.state != INVALID for m in self.members.values())

    @property
    def is_complete(self) -> bool:
        """Whether every slot is filled and every living member scored."""
        return self.num_waiting == 0 and len(self.members) == self.size

    def knows(self, slot: int, attempt: str) -> bool:
        """Whether this attempt came before."""
        return self.holders.get(slot) == attempt or f"{slot}:{attempt}" in self.dropped

    @property
    def num_pending(self) -> int:
        """Trajectories held here that have no final state yet."""
        if not self.is_open:
            return 0
        living = sum(m.state == LIVE for m in self.members.values())
        return living + (self.withheld >= 0)

    def close_due_ms(self) -> int | None:
        """Deadline of what is still open; None when something may be waited for without end."""
        if not self.is_timed or not self.is_open:
            return None
        due = NO_TIME
        if len(self.members) < self.size:
            if self.fill_by_ms is None:
                return None
            due = self.fill_by_ms
        for member in self.members.values():
            if member.num_missing:
                if member.deadline_ms is None:
                    return None
                due = max(due, member.deadline_ms)
        return due

    def forget_due_ms(self) -> int | None:
        """When the next thing here is forgotten."""
        due = self.forget_at_ms
        for early in self.early:
            due = early.keep_until_ms if due is None else min(due, early.keep_until_ms)
        return due


def member_of(trajectory: Trajectory, offset: int) -> Member:
    """What is remembered of a trajectory: where it lies, and the rewards it brought."""
    t, at = trajectory, trajectory.produced_at
    if t.is_failed:
        return Member(offset, at, None, FAILED, 0, (), {}, [], t.failure[:MAX_DETAIL])
    deadline = None if t.reward_deadline_ms is None else at + t.reward_deadline_ms
    lengths = tuple([len(s.tokens) // 4 for s in t.sequences])
    brought = _brought(t.scores, at)
    scores = [brought.get(source) for source in t.reward_sources]
    missing = len(scores) - len(brought)
    return Member(offset, at, deadline, LIVE, missing, lengths, t.reward_sources, scores)


def standing_of(reward: Reward) -> Standing:
    """What is remembered of a reward event."""
    assert reward.produced_at is not None, "the shell puts the log's time where it is absent"
    spans = _spans(reward.span, reward.value)
    return Standing(reward.value, reward.produced_at, reward.revision, reward.event_id, spans)


def split_id(trajectory_id: str) -> tuple[str, int, str]:
    """group_id, slot and attempt of a trajectory_id.

    Raises:
        InvalidEvent: the slot is no plain number.
    """
    parts = trajectory_id.rsplit(":", 2)
    slot = parts[1] if len(parts) == 3 else ""
    if slot.isdecimal() and len(slot) < 10 and str(int(slot)) == slot:
        return parts[0], int(parts[1]), parts[2]
    raise InvalidEvent(
        f"trajectory_id {trajectory_id!r} is not <group_id>:<slot>:<attempt> with a slot number.",
        field="trajectory_id",
    )


def _brought(scores: list[Score], time_ms: int) -> dict[str, float | Standing]:
    """Scores of one source are steps of one reward: their values add up."""
    brought: dict[str, float | Standing] = {}
    for score in scores:
        held = brought.get(score.source)
        if held is None and score.span is None:
            brought[score.source] = score.value
            continue
        if not isinstance(held, Standing):
            held = brought[score.source] = Standing(held or 0.0, time_ms)
        held.value += score.value
        held.spans += _spans(score.span, score.value)
    return brought


def _spans(span: Span | None, value: float) -> Spans:
    return () if span is None else ((span.sequence, span.start, span.end, value),)


encode_group = msgspec.msgpack.Encoder().encode
decode_group = msgspec.msgpack.Decoder(Group).decode
