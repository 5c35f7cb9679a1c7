"""The topic catalogue: what each topic carries, how it is keyed, partitioned and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from . import events as ev
from .errors import ConfigError

DEFAULT_MAX_EVENT_BYTES = 8 * 2**20
NUM_TASK_PARTITIONS = 64


@dataclass(frozen=True)
class Topic:
    """One topic of a run.

    `partitions`: "run" follows the run's number (4 unless configured), so that one stream
    worker sees a whole group; otherwise a fixed number. `kept`: "long" for ever unless
    configured, "hours" a day, "compact" the last value of each key.
    """

    name: str
    key: str
    carries: tuple[type[ev.Event], ...]
    partitions: int | Literal["run"] = "run"
    kept: Literal["long", "hours", "compact"] = "long"


CATALOGUE: dict[str, Topic] = {
    t.name: t
    for t in (
        Topic("tasks", "group_id", (ev.Task, ev.Ended), NUM_TASK_PARTITIONS),
        Topic("trajectories", "group_id", (ev.Trajectory,)),
        Topic("rewards", "group_id", (ev.Reward,)),
        Topic("experiences", "group_id", (ev.Experience,)),
        Topic("clock", "partition", (ev.Clock,)),
        Topic("drops", "group_id", (ev.Drop,)),
        Topic("train_steps", "branch/step", (ev.Cut, ev.TrainStep), 1),
        Topic("checkpoints", "branch/step", (ev.Checkpoint, ev.SaveFailed, ev.Branch), 1),
        Topic("evaluations", "taskset", (ev.Evaluation,), 1),
        Topic("heartbeats", "process", (ev.Heartbeat,), 1, "hours"),
        Topic("dead_letters", "topic", (ev.DeadLetter, ev.Replay), 1),
        Topic("join_state", "group_id", (), "run", "compact"),
    )
}


@dataclass(frozen=True)
class Topics:
    """The names of one run's topics: `<namespace>.<topic>`, the namespace `<project>.<name>`."""

    namespace: str
    num_partitions: int = 4

    def __post_init__(self) -> None:
        if not ev.is_id(self.namespace):
            raise ConfigError(
                f"project and name give the topic namespace {self.namespace!r}; use only letters, "
                "digits, '.', '_', ':' and '-' in both."
            )

    def name(self, topic: str) -> str:
        """Full name of a topic of the catalogue."""
        return f"{self.namespace}.{CATALOGUE[topic].name}"

    def short(self, full_name: str) -> str:
        """Catalogue name of a full name."""
        return full_name.removeprefix(f"{self.namespace}.")

    def partitions(self, topic: str) -> int:
        """Number of partitions of a topic of the catalogue."""
        n = CATALOGUE[topic].partitions
        return self.num_partitions if n == "run" else n


def key_of(event: ev.Event, topic: str) -> bytes:
    """The record key of an event on `topic` of the catalogue."""
    kind = CATALOGUE[topic].key
    if kind == "group_id" and isinstance(event, ev.Reward):
        return ev.group_of(event.trajectory_id).encode()
    if kind == "branch/step":
        return f"{event.branch}/{event.step}".encode()  # type: ignore[attr-defined]
    if isinstance(event, ev.Ended):
        return b"ended"
    return str(getattr(event, kind)).encode()


@lru_cache(maxsize=1 << 16)
def partition_for(key: bytes, num_partitions: int) -> int:
    """Partition of a key: murmur2 as the Java client and librdkafka's `murmur2_random` place it."""
    return (_murmur2(key) & 0x7FFFFFFF) % num_partitions


def _murmur2(key: bytes) -> int:
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for i in range(0, whole, 4):
        k = (int.from_bytes(key[i : i + 4], "little") * m) & mask
        k = ((k ^ (k >> 24)) * m) & mask
        h = ((h * m) & mask) ^ k
    if tail := key[whole:]:
        h = ((h ^ int.from_bytes(tail, "little")) * m) & mask
    h = ((h ^ (h >> 13)) * m) & mask
    return h ^ (h >> 15)
