"""From places on the log to training examples: a bounded cache, else read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...schemas import codec
from ...schemas.errors import (
    InvalidEvent,
    LogError,
    StorageCorrupt,
    StreamrftError,
    UndecodableRecord,
)
from ...schemas.events import CutMember, Experience, Trajectory
from ...streams import blobs
from ...streams.log import Log, Position, Record
from ..learning.examples import TrainingExample, examples_from_experience

DEFAULT_CACHE_BYTES = 256 * 2**20


class UnusableExperience(StreamrftError):
    """A member of a batch cannot be trained on: broken, or its claim is missing or altered."""

    def __init__(self, member: CutMember, why: str) -> None:
        super().__init__(f"experience {member.trajectory_id}: {why}")
        self.member, self.why = member, why


class Payloads:
    """Record values of waiting experiences, at most `cache_bytes` of them in memory.

    What came when the cache was full is read again from the log when its batch is cut.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        check: Callable[[TrainingExample], None] | None = None,
    ) -> None:
        """`check` raises InvalidEvent for an example that cannot be trained on."""
        self._check = check
        self._log, self._topic, self._cache_bytes = log, topic, cache_bytes
        self._values: dict[tuple[int, int], bytes] = {}
        self._size_bytes = 0

    def keep(self, record: Record) -> None:
        """Remember a value that will be needed, unless the cache is full."""
        value = record.value or b""
        if self._size_bytes + len(value) <= self._cache_bytes:
            self._values[record.partition, record.offset] = value
            self._size_bytes += len(value)

    def forget(self, partition: int, offset: int) -> None:
        """The value will not be needed any more."""
        self._size_bytes -= len(self._values.pop((partition, offset), b""))

    def examples(self, members: Sequence[CutMember]) -> list[TrainingExample]:
        """Members in order, as the learner takes them, claims resolved.

        Raises:
            UnusableExperience: a member is broken for ever. A retriable StreamrftError: storage
                or log are away, ask again.
        """
        missing = [m for m in members if (m.partition, m.offset) not in self._values]
        records = self._log.read_at([Position(self._topic, m.partition, m.offset) for m in missing])
        read = {(r.partition, r.offset): r.value or b"" for r in records}
        places = [(m.partition, m.offset) for m in members]
        values = [read[place] if place in read else self._values[place] for place in places]
        return [self._example(m, v) for m, v in zip(members, values, strict=True)]

    def _example(self, member: CutMember, value: bytes) -> TrainingExample:
        try:
            experience = codec.decode(value, Experience)
            if experience.trajectory_id != member.trajectory_id:
                raise LogError(
                    f"{self._topic}[{member.partition}]@{member.offset} holds experience "
                    f"{experience.trajectory_id}, expected was {member.trajectory_id}. The log is "
                    "not the one that the checkpoint and its cuts were made from."
                )
            trajectory = codec.decode(experience.trajectory, Trajectory)
            if trajectory.claim is not None:
                trajectory = blobs.resolve(trajectory)
            example = examples_from_experience(experience, trajectory)
            if self._check is not None:
                self._check(example)
            return example
        except (UndecodableRecord, InvalidEvent, StorageCorrupt) as error:
            raise UnusableExperience(member, str(error)) from error
