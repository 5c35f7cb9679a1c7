"""The live tail: reads experiences, drops and the end of tasks, hands out batches of whole groups.

Only this module of the sources touches the log. Memory: what waits is about 500 bytes an
experience, and payloads up to the cache's size; the rest is read again when its batch is cut.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...schemas import codec
from ...schemas.errors import InvalidEvent, LogUnavailable, UndecodableRecord
from ...schemas.events import Cut, Drop, Ended, Experience, Task, Trajectory, now_ms
from ...schemas.topics import Topics
from ...streams.log import Log, Partition, Position, Record
from ...streams.reading import begins, drain
from ..announcer import Announcer
from ..learning.examples import TrainingExample
from .groups import GroupAssembly
from .members import BatchRules, Lineage, Member, member_of
from .payloads import Payloads, UnusableExperience
from .source import Batch

logger = logging.getLogger("streamrft")

MAX_POLL_RECORDS = 100
MAX_POLLS = 50
NUM_BATCHES_AHEAD = 4
MANY_UNPAIRED = 8

_NUM_NAMING_FIELDS = 15  # of an Experience, trajectory_id to group_experiences


class OnlineSource:
    """Tail of one run's experiences for the trainer that holds the lease. See `Source`."""

    def __init__(
        self,
        log: Log,
        topics: Topics,
        announcer: Announcer,
        rules: BatchRules,
        lineage: Lineage,
        branch: str,
        *,
        position: Mapping[str, Any] | None = None,
        reader: str = "trainer",
        check: Callable[[TrainingExample], None] | None = None,
    ) -> None:
        """Open at the start of the log, or at what `position()` gave at a checkpoint.

        `check` raises InvalidEvent for an example that the model cannot take.
        """
        self._topics, self._announcer, self._reader = topics, announcer, reader
        self._rules = rules
        n = topics.partitions("experiences")
        self.groups = GroupAssembly(rules, lineage, branch, n, (position or {}).get("groups"))
        self.payloads = Payloads(log, topics.name("experiences"), check=check)
        self._log, self._steps_done, self.num_read = log, 0, 0
        self._num_came = self._tokens_came = 0
        self._unread = deque[Record]()
        self._tell_at = self._many_unpaired
        self._consumer = log.consumer(group=f"{topics.namespace}.trainer", member=reader)
        self._consumer.assign(self._start_positions(position or {}))
        if ended := (position or {}).get("ended"):
            self.groups.on_ended(Ended(**ended))
        self._ended: dict[str, Any] | None = (position or {}).get("ended")

    def catch_up(self) -> None:
        """Read `drops` and the end of `tasks` as far as they reach now, before any experience.

        What an earlier trainer dropped after its checkpoint is known then and not dropped twice.
        """
        experiences = self._partitions("experiences")
        self._consumer.pause(experiences)
        rest = [p for p in self._consumer.assignment() if p not in experiences]
        for record in drain(self._log, self._consumer, rest):
            self._take_in(record)
        self._consumer.resume(experiences)

    def poll(self, steps_done: int, timeout_ms: int) -> int:
        """Read on and publish the drops that follow; returns how many records came."""
        self._steps_done = steps_done
        if not self._unread:
            self._unread.extend(self._consumer.poll(MAX_POLL_RECORDS, timeout_ms))
        num_records = len(self._unread)
        while self._unread:
            # one that fails, as a log that is away makes it, is taken in by the next poll
            self._take_in(self._unread[0])
            self._unread.popleft()
            self.num_read += 1
        self._drop(self.groups.judge(steps_done, now_ms()))
        self._release()
        self._tell_unpaired()
        return num_records

    def next_batch(self, steps_done: int) -> Batch | None:
        """Read what is there and cut the next batch; None when too little came yet.

        Raises:
            A retriable StreamrftError when a payload cannot be fetched now: ask again.
        """
        limit = NUM_BATCHES_AHEAD * self._rules.batch_groups
        for _ in range(MAX_POLLS):
            if not self.poll(steps_done, timeout_ms=0) or self.groups.num_ready >= limit:
                break
        while (selected := self.groups.select()) is not None:
            members = [m.as_cut_member() for m in selected]
            try:
                return Batch(self.payloads.examples(members), members)
            except UnusableExperience as error:
                broken = next(m for m in selected if m.trajectory_id == error.member.trajectory_id)
                place = Position(self._topics.name("experiences"), broken.partition, broken.offset)
                (record,) = self._log.read_at([place])
                self._drop_unusable(broken, error.why, steps_done, record)
                self._drop(self.groups.judge(steps_done, now_ms()))
        return None

    def take(self, batch: Batch) -> None:
        """Mark its members as trained, also those of a recorded cut that were not read yet."""
        for m, e in zip(batch.members, batch.examples, strict=True):
            self.groups.take([(e.group_id, e.number, m.partition, m.offset)])
        self._tell_at = self._many_unpaired
        self._release()

    @property
    def produced_length(self) -> float | None:
        """Mean trained tokens of what came to this process, also of what went stale."""
        return self._tokens_came / self._num_came if self._num_came else None

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train and nothing will come."""
        return self.groups.is_finished

    def blocker(self, step: int) -> str:
        """What the batch of `step` waits for, for people."""
        return self.groups.blocker(step)

    def recorded(self, cut: Cut) -> Batch:
        """The batch of a cut that was made before, read again.

        Raises:
            UnusableExperience: a member is not what it was. Retriable ones as `next_batch`.
        """
        return Batch(self.payloads.examples(cut.members), cut.members)

    def position(self) -> dict[str, Any]:
        """Plain JSON for the checkpoint's metadata."""
        at = {**self._consumer.positions()}
        for record in reversed(self._unread):
            at[Partition(record.topic, record.partition)] = record.offset
        drops = self._partitions("drops")
        return {
            "groups": self.groups.position(),
            "tasks": at[self._tasks],
            "drops": {str(p.partition): at[p] for p in drops},
            "ended": self._ended,
        }

    def commit(self, position: Mapping[str, Any]) -> None:
        """Store the position as the group's, for lag only: a log that is away is no error."""
        offsets = position["groups"]["experiences"]
        at = {p: offsets[str(p.partition)]["next"] for p in self._partitions("experiences")}
        try:
            self._consumer.commit(at)
        except LogUnavailable as error:
            logger.warning("the trainer's lag is shown late: %s", error)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    @property
    def _many_unpaired(self) -> int:
        """Groups without a pair, in one step, that are worth a line."""
        return max(MANY_UNPAIRED, 2 * self._rules.batch_groups)

    def _tell_unpaired(self) -> None:
        """Say why nothing is trained, again when it is twice as many."""
        if (count := self.groups.num_unpaired) >= self._tell_at:
            self._tell_at = 2 * count
            logger.warning(
                "%d groups since the last step have no two different rewards, so no pair is made "
                "of them: does the policy always answer alike, or the reward never differ?",
                count,
            )

    @property
    def _tasks(self) -> Partition:
        return Partition(self._topics.name("tasks"), 0)

    def _partitions(self, topic: str) -> list[Partition]:
        name = self._topics.name(topic)
        return [Partition(name, p) for p in range(self._topics.partitions(topic))]

    def _start_positions(self, position: Mapping[str, Any]) -> dict[Partition, int]:
        """Saved positions as they are; a partition without one from its first kept record."""
        wanted = [self._tasks, *self._partitions("drops"), *self._partitions("experiences")]
        first = begins(self._log, *{p.topic for p in wanted})
        starts = {p: first[p] for p in wanted}
        if position:
            starts[self._tasks] = position["tasks"]
            for p in self._partitions("drops"):
                starts[p] = position["drops"][str(p.partition)]
            for p in self._partitions("experiences"):
                starts[p] = self.groups.offsets[p.partition].lowest
        return starts

    def _take_in(self, record: Record) -> None:
        topic = self._topics.short(record.topic)
        if topic == "experiences":
            self._take_experience(record)
            return
        try:
            event = codec.decode(record.value or b"", Drop, Task, Ended)
        except (UndecodableRecord, InvalidEvent) as error:
            self._announcer.dead_letter(record, str(error), self._reader)
            return
        if isinstance(event, Drop):
            self.groups.on_drop(event)
        elif isinstance(event, Ended) and event.branch == self.groups.branch:
            self.groups.on_ended(event)
            self._ended = {
                "branch": event.branch,
                "num_groups": event.num_groups,
                "produced_at": event.produced_at,
            }

    def _take_experience(self, record: Record) -> None:
        place = record.partition, record.offset
        try:
            experience = codec.decode(record.value or b"", Experience)
        except (UndecodableRecord, InvalidEvent) as error:
            self._take_unreadable(record, str(error))
            return
        try:
            codec.decode(experience.trajectory, Trajectory)
        except (UndecodableRecord, InvalidEvent) as error:
            if self.groups.on_experience(experience, *place):
                member = member_of(experience, *place)
                self._drop_unusable(member, f"its trajectory: {error}", self._steps_done, record)
            return
        if self.groups.on_experience(experience, *place):
            self.payloads.keep(record)
            self._num_came += 1
            self._tokens_came += experience.num_trained_tokens

    def _take_unreadable(self, record: Record, error: str) -> None:
        """A dead letter; also a drop when the broken record still says which experience it was."""
        known = codec.peek(record.value or b"", Experience, _NUM_NAMING_FIELDS)
        group_id = known.get("group_id") or (record.key or b"").decode(errors="replace")
        number = known.get("number", _number_of(group_id))
        name = known.get("trajectory_id") or f"{record.partition}@{record.offset}"
        if self.groups.is_news(group_id, number, record.partition, record.offset):
            self._announcer.dead_letter(record, error, self._reader)
            # a broken repeat takes nothing from what waits here
            if known and not self.groups.holds(group_id, name):
                known |= {"trajectory_id": name, "group_id": group_id}
                self._announcer.publish("drops", self._invalid(known, error))
        # told first: what could not be told is taken in again
        self.groups.on_unreadable(group_id, number, name, record.partition, record.offset)

    def _invalid(self, known: Mapping[str, Any], error: str) -> Drop:
        """Of a record of which only the fields that name it could be read."""
        return Drop(
            trajectory_id=known["trajectory_id"],
            group_id=known["group_id"],
            slot=known["slot"],
            number=known["number"],
            reason="invalid",
            detail=error,
            where="trainer",
            branch=self.groups.branch,
            step=self._steps_done,
            group_experiences=known["group_experiences"],
            produced_at=now_ms(),
        )

    def _drop(self, drops: Sequence[Drop]) -> None:
        if drops:
            self._announcer.publish("drops", *drops)
            self._release()

    def _drop_unusable(self, member: Member, why: str, steps_done: int, record: Record) -> None:
        drop = self.groups.drop(member, "invalid", why, steps_done, now_ms())
        self._announcer.dead_letter(record, why, self._reader)
        self._announcer.publish("drops", drop)
        self.groups.on_drop(drop)
        self._release()

    def _release(self) -> None:
        for partition, offset in self.groups.released:
            self.payloads.forget(partition, offset)
        self.groups.released.clear()


def _number_of(group_id: str) -> int:
    """The publication number inside `<taskset>.<number>`; -1 when there is none."""
    number = group_id.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1
