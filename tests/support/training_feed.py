"""A trainer without the rest of a run: experiences are written straight to the log."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from forked import FORKED
from topic_events import events_on

from streamrft.consumers.announcer import Announcer
from streamrft.consumers.settings import AlgorithmSettings, OptimizerSettings, TrainerSettings
from streamrft.consumers.sources.members import BatchRules
from streamrft.consumers.sources.online import OnlineSource
from streamrft.schemas import arrays, codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import Topics, key_of
from streamrft.streams.lineage import Lineage
from streamrft.streams.log import open_log, topic_specs

E = TypeVar("E", bound=ev.Event)
TOPICS = Topics("tests.feed", 2)
GROUP_SIZE = 2


def experience(
    number: int, slot: int = 0, *, version: int = 0, branch: str = "main", **changes: Any
) -> ev.Experience:
    """A short scored trajectory; its tokens are a function of (number, slot)."""
    record = _trajectory(number, slot, version, branch)
    rewards = [float(np.random.RandomState([number, s]).randint(2)) for s in range(GROUP_SIZE)]
    rewards[0] = 1.0 - rewards[1]
    group = [
        ev.GroupMember(
            slot=s, trajectory_id=ev.trajectory_id(record.group_id, s, "a"), reward=reward
        )
        for s, reward in enumerate(rewards)
    ]
    made = ev.Experience(
        trajectory_id=record.trajectory_id,
        reward_revision=0,
        group_id=record.group_id,
        slot=slot,
        number=number,
        branch=branch,
        min_policy_version=version,
        max_policy_version=version,
        num_tokens=8,
        num_trained_tokens=4,
        reward=rewards[slot],
        reward_parts={"test": rewards[slot]},
        group=group,
        group_experiences=GROUP_SIZE,
        trajectory=codec.encode(record),
        trajectory_partition=0,
        trajectory_offset=0,
        produced_at=1,
    )
    return msgspec.structs.replace(made, **changes)


def _trajectory(number: int, slot: int, version: int, branch: str) -> ev.Trajectory:
    group_id = f"rows.{number}"
    return ev.Trajectory(
        trajectory_id=ev.trajectory_id(group_id, slot, "a"),
        group_id=group_id,
        slot=slot,
        attempt="a",
        number=number,
        producer="test",
        branch=branch,
        min_policy_version=version,
        max_policy_version=version,
        group_size=GROUP_SIZE,
        sequences=[_sequence(np.random.RandomState([number, slot]), version)],
        finish_reason="stop",
        reward_sources={"test": 1.0},
        produced_at=1,
    )


def _sequence(random: np.random.RandomState, version: int) -> ev.Sequence:
    return ev.Sequence(
        tokens=arrays.pack_ints(random.randint(10, 200, 8)),
        loss_mask=arrays.pack_mask([0] * 4 + [1] * 4),
        logprobs=arrays.pack_floats([0.0] * 4 + [-5.5] * 4),
        policy_versions=arrays.pack_runs([version] * 4),
    )


def group(number: int, **changes: Any) -> list[ev.Experience]:
    """All members of one group."""
    return [experience(number, slot, **changes) for slot in range(GROUP_SIZE)]


def ended(num_groups: int, branch: str = "main") -> ev.Ended:
    """No more tasks come."""
    return ev.Ended(branch=branch, num_groups=num_groups, produced_at=1)


@dataclass
class Feed:
    """One log and one checkpoint folder under `folder`, and trainers on them."""

    folder: Path
    model: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = open_log(self.url)
        self.log.ensure_topics(topic_specs(TOPICS))
        self._producer = self.log.producer()

    @property
    def url(self) -> str:
        """The log."""
        return f"sqlite:///{self.folder / 'log.db'}"

    def trainer_settings(self, **changes: Any) -> TrainerSettings:
        """Two groups a step, a learning rate that changes weights visibly."""
        base = TrainerSettings(
            model_path=str(self.model),
            checkpoint_uri=str(self.folder / "checkpoints"),
            algorithm=AlgorithmSettings(optimizer=OptimizerSettings(lr=1e-3)),
            batch_groups=2,
            deterministic=True,
            num_threads=1,
            max_read_timeout_ms=60_000,
            lease_ms=5_000,
        )
        return replace(base, **{**self.settings, **changes})

    def write(self, *events: ev.Event, topic: str = "experiences") -> None:
        """Append events durably."""
        for event in events:
            partition = 0 if isinstance(event, ev.Ended) else None
            self._producer.send(
                TOPICS.name(topic),
                codec.encode(event),
                key=key_of(event, topic),
                partition=partition,
            )
        self._producer.flush()

    def write_groups(self, numbers: Iterable[int], **changes: Any) -> None:
        """Append whole groups."""
        for number in numbers:
            self.write(*group(number, **changes))

    def start(self, *, kill_at: str = "", max_file_bytes: int = -1, **changes: Any) -> Any:
        """A trainer process; `kill_at` as STREAMRFT_KILL_AT, without its marker file.

        `max_file_bytes`: no file of the process may become larger, as on a disk that is full.
        """
        marker = self.folder / "killed"
        environment = dict(self.environment)
        if kill_at:
            environment["STREAMRFT_KILL_AT"] = f"{kill_at}={marker}"
        process = FORKED.Process(
            target=_run,
            args=(
                self.url,
                self.trainer_settings(**changes),
                environment,
                self.said_at,
                max_file_bytes,
            ),
        )
        process.start()
        return process

    def train(self, *, timeout_s: float = 240, **changes: Any) -> int:
        """Run a trainer, as `start` does, to its end; the exit code is -9 when it was killed."""
        process = self.start(**changes)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"the trainer did not end in {timeout_s} s")
        return process.exitcode

    def open_source(self, **rules: Any) -> OnlineSource:
        """What a trainer reads, of one group a batch, in the process of the test."""
        lease = self.log.acquire("trainer", owner="test", ttl_ms=60_000, timeout_ms=0)
        announcer, lineage = Announcer(self.log, TOPICS, lease), Lineage.of("main", [])
        return OnlineSource(self.log, TOPICS, announcer, BatchRules(1, **rules), lineage, "main")

    def read(self, topic: str, *kinds: type[E]) -> list[E]:
        """Events of these kinds on a topic, in order within each partition."""
        return events_on(self.log, TOPICS, topic, *kinds)

    @property
    def said_at(self) -> Path:
        """Where trainers log to."""
        return self.folder / "trainer.log"

    @property
    def said(self) -> str:
        """What trainers logged, their errors included."""
        return self.said_at.read_text()

    @property
    def cuts(self) -> list[ev.Cut]:
        """All cuts."""
        return self.read("train_steps", ev.Cut)

    @property
    def digests(self) -> dict[tuple[str, int], str]:
        """Digest of each announced version by branch; asserts that a version has one."""
        found: dict[tuple[str, int], str] = {}
        for c in self.read("checkpoints", ev.Checkpoint):
            assert found.setdefault((c.branch, c.step), c.digest) == c.digest
        return found

    def close(self) -> None:
        """Release the log."""
        self.log.close()


def whole_feed(folder: Path, model: Path, num_groups: int, **options: Any) -> Feed:
    """A feed with all its groups and their end; `options` as those of Feed."""
    folder.mkdir(parents=True, exist_ok=True)
    feed = Feed(folder, model, **options)
    feed.write_groups(range(num_groups))
    feed.write(ended(num_groups), topic="tasks")
    return feed


def trained_ids(cuts: Iterable[ev.Cut]) -> list[str]:
    """Trajectories of some cuts, in training order."""
    return [m.trajectory_id for cut in cuts for m in cut.members]


def _run(
    url: str,
    settings: TrainerSettings,
    environment: dict[str, str],
    log_to: Path,
    max_file_bytes: int,
) -> None:
    from streamrft.consumers.trainer import run_trainer
    from streamrft.streams.process import Process

    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    logging.basicConfig(filename=log_to, level=logging.INFO)
    log = open_log(url)
    process = Process(log, TOPICS, name="trainer", role="trainer")
    process.stop_on_signals()
    try:
        run_trainer(process, settings)
        process.ended()
    except Exception:
        logging.exception("the trainer ends with an error")
        raise
    finally:
        log.close()
