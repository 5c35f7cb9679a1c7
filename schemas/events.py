"""The events of the log as typed, immutable values; `*.avsc` beside this file is the contract.

Field meanings, units and shapes stand in the `.avsc` files. A test holds both in step.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal, get_args

import msgspec

from .arrays import Float32s, Int32s, Runs, Uint8s

DropReason = Literal[
    "filtered", "expired", "late", "stale", "superseded", "failed", "off_lineage", "invalid"
]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)

Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_ID = re.compile(r"[A-Za-z0-9._:-]+\Z")


def now_ms() -> int:
    """Wall clock, milliseconds since the Unix epoch. For shells only: operators are given time."""
    return time.time_ns() // 1_000_000


def is_id(text: str) -> bool:
    """Whether `text` uses the characters that ids may have."""
    return bool(_ID.match(text))


def trajectory_id(group_id: str, slot: int, attempt: str) -> str:
    """The id of one execution, known before it begins."""
    return f"{group_id}:{slot}:{attempt}"


def group_of(trajectory_id: str) -> str:
    """The group_id inside a trajectory_id; the text itself when it has no slot and attempt."""
    parts = trajectory_id.rsplit(":", 2)
    return parts[0] if len(parts) == 3 else trajectory_id


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events: immutable, compared by value."""


class Span(Event, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of tokens of one sequence that a score is about."""

    sequence: Int
    start: Int
    end: Int


class Score(Event, frozen=True, kw_only=True):
    """A reward that was known when the rollout ended."""

    source: str
    value: float
    span: Span | None = None


class Turn(Event, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: str
    start: Int
    end: Int
    text: str


class Sequence(Event, frozen=True, kw_only=True):
    """One training sequence: exactly the tokens that the engine saw and wrote."""

    tokens: Int32s
    loss_mask: Uint8s
    logprobs: Float32s
    policy_versions: Runs
    temperature: float = 1.0
    truncated: bool = False
    turns: list[Turn] = []

    @property
    def num_tokens(self) -> int:
        """Length T."""
        return len(self.tokens) // 4


class Claim(Event, frozen=True, kw_only=True):
    """Where the sequences of a record over max_event_bytes lie."""

    uri: str
    sha256: str
    size_bytes: Long


class Task(Event, frozen=True, kw_only=True):
    """One row of a taskset to be rolled out group_size times."""

    group_id: str
    number: Long
    taskset: str
    row: Long
    epoch: Int
    branch: str
    step: Long
    min_policy_version: Long
    group_size: Int
    workflow: str
    reward_fn: str = ""
    replaces: Long = -1
    content: str
    produced_at: Long


class Ended(Event, frozen=True, kw_only=True):
    """No more tasks will come on this branch."""

    branch: str
    num_groups: Long
    produced_at: Long


class Trajectory(Event, frozen=True, kw_only=True):
    """The record of one rollout, failed ones included."""

    trajectory_id: str
    group_id: str
    slot: Int
    attempt: str
    number: Long = -1
    taskset: str = ""
    row: Long = -1
    epoch: Int = 0
    producer: str
    branch: str
    min_policy_version: Long
    max_policy_version: Long
    group_size: Int
    sequences: list[Sequence]
    finish_reason: str
    failure: str = ""
    scores: list[Score] = []
    reward_sources: dict[str, float]
    reward_deadline_ms: Long | None = None
    group_deadline_ms: Long | None = None
    metrics: dict[str, float] = {}
    attachments: dict[str, str] = {}
    claim: Claim | None = None
    produced_at: Long

    @property
    def is_failed(self) -> bool:
        """Whether the rollout failed, so that nothing is waited for."""
        return self.finish_reason == "failed"


class Reward(Event, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A score for one trajectory, from anyone, at any time."""

    event_id: str
    trajectory_id: str
    source: str
    value: float
    revision: Int = 0
    span: Span | None = None
    metadata: dict[str, str] = {}
    produced_at: Long | None = None


class GroupMember(Event, frozen=True, kw_only=True):
    """One scored rollout of a group, also when it was filtered out."""

    slot: Int
    trajectory_id: str
    reward: float


class Experience(Event, frozen=True, kw_only=True):
    """A trajectory joined with its rewards: what can be trained on."""

    trajectory_id: str
    reward_revision: Int
    group_id: str
    slot: Int
    number: Long
    branch: str
    min_policy_version: Long
    max_policy_version: Long
    num_tokens: Long
    num_trained_tokens: Long
    reward: float
    reward_parts: dict[str, float]
    token_rewards: Float32s | None = None
    group: list[GroupMember]
    group_experiences: Int
    loss_mask: Uint8s | None = None
    priority: float = 0.0
    metrics: dict[str, float] = {}
    trajectory: bytes
    trajectory_partition: Int
    trajectory_offset: Long
    produced_at: Long


class Clock(Event, frozen=True, kw_only=True):
    """Stream time of one partition."""

    partition: Int
    time_ms: Long
    positions: dict[str, Long]
    produced_at: Long


class Drop(Event, frozen=True, kw_only=True):
    """A named reason why a trajectory was not trained on."""

    trajectory_id: str
    group_id: str
    slot: Int
    number: Long
    reason: DropReason
    detail: str
    where: str
    branch: str = ""
    step: Long = -1
    group_experiences: Int | None = None
    produced_at: Long


class CutMember(Event, frozen=True, kw_only=True):
    """One experience of a cut."""

    trajectory_id: str
    reward_revision: Int
    partition: Int
    offset: Long


class Cut(Event, frozen=True, kw_only=True):
    """The batch of one step, published before it is trained."""

    branch: str
    step: Long
    members: list[CutMember]
    parent: str
    epoch: Long
    produced_at: Long


class TrainStep(Event, frozen=True, kw_only=True):
    """One optimiser step done."""

    branch: str
    step: Long
    num_experiences: Int
    num_tokens: Long
    metrics: dict[str, float]
    epoch: Long
    produced_at: Long


class Checkpoint(Event, frozen=True, kw_only=True):
    """Weights that can be served, or a state that can be resumed from.

    `base_uri` and `base_digest` name the model below an adapter; empty for a whole model.
    """

    branch: str
    step: Long
    kind: Literal["full", "weights"]
    uri: str
    digest: str
    manifest_sha256: str
    epoch: Long
    produced_at: Long
    base_uri: str = ""
    base_digest: str = ""


class SaveFailed(Event, frozen=True, kw_only=True):
    """A checkpoint could not be saved; training goes on and the save is tried again."""

    branch: str
    step: Long
    kind: Literal["full", "weights"]
    uri: str
    reason: str
    epoch: Long
    produced_at: Long


class Branch(Event, frozen=True, kw_only=True):
    """A fork: training goes on from a step of the parent."""

    branch: str
    parent: str
    step: Long
    produced_at: Long


class Evaluation(Event, frozen=True, kw_only=True):
    """Result of one evaluation taskset under one checkpoint."""

    taskset: str
    branch: str
    policy_version: Long
    num_tasks: Int
    metrics: dict[str, float]
    produced_at: Long


class Heartbeat(Event, frozen=True, kw_only=True):
    """One process is alive, idle for a named reason, or ended."""

    process: str
    role: str
    state: Literal["alive", "idle", "ended"]
    waiting_for: str = ""
    host: str
    pid: Long
    metrics: dict[str, float] = {}
    produced_at: Long


class DeadLetter(Event, frozen=True, kw_only=True):
    """A record that could not be read, with its position and the reason."""

    topic: str
    partition: Int
    offset: Long
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    error: str
    reader: str
    produced_at: Long


class Replay(Event, frozen=True, kw_only=True):
    """A dead letter was sent again to its topic."""

    topic: str
    dead_letter: Long
    produced_at: Long


EVENTS: tuple[type[Event], ...] = (
    Task,
    Ended,
    Trajectory,
    Reward,
    Experience,
    Clock,
    Drop,
    Cut,
    TrainStep,
    Checkpoint,
    SaveFailed,
    Branch,
    Evaluation,
    Heartbeat,
    DeadLetter,
    Replay,
)
