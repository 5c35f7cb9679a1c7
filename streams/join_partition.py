"""One partition of the join worker: records in, an outbox of records out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..schemas import codec
from ..schemas.errors import (
    InvalidEvent,
    OffsetOutOfRange,
    StorageCorrupt,
    StreamrftError,
    UndecodableRecord,
)
from ..schemas.events import Clock, Drop, Reward, Trajectory, is_id
from ..schemas.topics import Topics, partition_for
from ..schemas.validate import check_time
from .dead_letters import dead_letter
from .join.join import RewardJoin
from .join.outcomes import Closed, Dropped, Misaddressed, Outcome
from .log import Log, Position, Record
from .outbox import COUNTERS_KEY, Outbox, Outgoing, encode_counters
from .payloads import Payload, PayloadCache
from .pipeline import Pipeline, drop_event
from .settings import StreamSettings

logger = logging.getLogger("streamrft")

TRACE_HEADERS = ("traceparent", "tracestate")
SHELL_COUNTS = ("dead_letters", "experiences", "drops")
# trajectory_id to group_size stand first in every Trajectory schema
_NUM_HEAD_FIELDS = 13
_POISON = (UndecodableRecord, InvalidEvent, StorageCorrupt)


class PartitionJoin:
    """Decodes, joins and builds for one partition. The worker makes its outbox durable.

    After an error it is thrown away and restored from the log.
    """

    def __init__(
        self,
        log: Log,
        topics: Topics,
        settings: StreamSettings,
        pipeline: Pipeline,
        *,
        partition: int,
        reader: str,
    ) -> None:
        self._log, self._topics, self._settings, self._pipeline = log, topics, settings, pipeline
        self.partition, self._reader = partition, reader
        self.late_horizon_ms = settings.late_horizon_ms
        self.join = RewardJoin(
            settings, partition=partition, num_partitions=topics.partitions("trajectories")
        )
        self.join.counts.update(dict.fromkeys(SHELL_COUNTS, 0))
        self._cache = PayloadCache(
            max(1, settings.cache_bytes // topics.partitions("trajectories"))
        )
        self._trajectories = topics.name("trajectories")
        self.out = Outbox(topics)
        self.now_ms = 0

    def restore(self, states: Iterable[bytes], counters: Mapping[str, int]) -> None:
        """Go on where the last committed batch of this partition ended."""
        counts = {name: counters.get(name, 0) for name in self.join.counts}
        self.join.restore(states, counts=counts, time_ms=counters.get("time_ms", 0))

    def take(self, record: Record) -> None:
        """Apply one record of trajectories or rewards.

        Raises:
            StreamrftError: only retriable ones; the partition has to be restored.
        """
        if record.topic == self._trajectories:
            self._take_trajectory(record)
        else:
            self._take_reward(record)

    def tick(self, time_ms: int) -> None:
        """Apply a clock event."""
        self._settle(self.join.on_time(time_ms))

    def close_all(self) -> None:
        """Close what is left at the end of a history without clock events."""
        self._settle(self.join.close_all())

    def clock(self, time_ms: int, positions: Mapping[str, int]) -> None:
        """Append a clock event and apply it."""
        event = Clock(
            partition=self.partition,
            time_ms=time_ms,
            positions=dict(positions),
            produced_at=self.now_ms,
        )
        self.out.event("clock", event, partition=self.partition)
        self.tick(time_ms)

    def finish(self, positions: Mapping[str, int]) -> Outbox:
        """The batch's records with the state that they change; a new batch begins.

        `positions`: by topic, the next offset that was not applied; a part of the state.
        """
        for group_id, state in self.join.take_changes().items():
            self.out.add(Outgoing("join_state", group_id.encode(), state, self.partition))
        counters = encode_counters(self.counters(), positions)
        self.out.add(Outgoing("join_state", COUNTERS_KEY, counters, self.partition))
        out, self.out = self.out, Outbox(self._topics)
        return out

    def counters(self) -> dict[str, int]:
        """Counts since the run began, sizes of the open state, stream time."""
        return self.join.counts | self.join.gauges() | {"time_ms": self.join.time_ms}

    def _take_trajectory(self, record: Record) -> None:
        try:
            trajectory = codec.decode(record.value, Trajectory)
            check_time(trajectory.produced_at, record.timestamp_ms, self._settings.max_skew_ms)
            if not trajectory.is_failed:
                self._cache.put(record.offset, self._payload(record, trajectory))
            outcomes = self.join.on_trajectory(trajectory, record.position)
        except _POISON as error:
            self._cache.discard(record.offset)
            self._refuse_trajectory(record, error)
            return
        self._settle(outcomes)
        if any(
            isinstance(o, Dropped) and o.trajectory_id == trajectory.trajectory_id for o in outcomes
        ):
            self._cache.discard(record.offset)

    def _take_reward(self, record: Record) -> None:
        counts = self.join.counts
        try:
            reward = codec.decode(record.value, Reward)
            if reward.produced_at is None:
                reward = msgspec.structs.replace(reward, produced_at=record.timestamp_ms)
            check_time(reward.produced_at or 0, record.timestamp_ms, self._settings.max_skew_ms)
            outcomes = self.join.on_reward(reward)
        except InvalidEvent as error:
            counts["rewards"] += 1
            counts["refused"] += 1
            self.dead_letter(record, error)
            return
        except UndecodableRecord as error:
            self.dead_letter(record, error)
            return
        if len(outcomes) == 1 and isinstance(outcomes[0], Misaddressed):
            self._forward(record, outcomes[0])
        else:
            self._settle(outcomes)

    def _forward(self, record: Record, misaddressed: Misaddressed) -> None:
        """Send a reward on as it came; its log time stays, as it may be its event time."""
        self.out.add(
            Outgoing(
                "rewards",
                misaddressed.group_id.encode(),
                record.value,
                None,
                record.headers,
                record.timestamp_ms,
            )
        )

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Closed):
                self._emit(outcome)
            elif isinstance(outcome, Dropped):
                self._drop(drop_event(outcome, self.now_ms))

    def _emit(self, closed: Closed) -> None:
        payloads = self._payloads(closed)
        result = self._pipeline.run(closed, payloads, partition=self.partition, now_ms=self.now_ms)
        key = closed.group_id.encode()
        values = codec.encode_siblings(result.experiences)
        for experience, value in zip(result.experiences, values, strict=True):
            headers = payloads[experience.slot].headers
            self.out.add(Outgoing("experiences", key, value, self.partition, headers))
        if not closed.revision:
            self.join.counts["experiences"] += len(result.experiences)
        for drop in result.drops:
            self._drop(drop)
        for slot, error in result.failures:
            self._dead_letter_of(closed, slot, error, payloads[slot])
        if self._settings.late != "amend":
            for member in closed.members:
                self._cache.discard(member.offset)

    def _drop(self, drop: Drop) -> None:
        self.join.counts["drops"] += 1
        self.out.event("drops", drop)

    def _payload(self, record: Record, trajectory: Trajectory) -> Payload:
        assert record.value is not None, "decoded records have values"
        headers = tuple([h for h in record.headers if h[0] in TRACE_HEADERS])
        return Payload.of(record.value, trajectory, headers)

    def _payloads(self, closed: Closed) -> dict[int, Payload]:
        """By slot; one that the log no longer keeps is left out."""
        payloads: dict[int, Payload] = {}
        for member in closed.members:
            payload = self._cache.get(member.offset) or self._read_again(member.offset)
            if payload is not None:
                payloads[member.slot] = payload
        return payloads

    def _read_again(self, offset: int) -> Payload | None:
        position = Position(self._trajectories, self.partition, offset)
        try:
            (record,) = self._log.read_at([position])
            return self._payload(record, codec.decode(record.value, Trajectory))
        except (OffsetOutOfRange, *_POISON) as error:
            logger.warning("%s: %s[%d]@%d: %s", self._reader, *position, error)
            return None

    def _refuse_trajectory(self, record: Record, error: Exception) -> None:
        self.dead_letter(record, error)
        value = record.value or b""
        fields = codec.peek(value, Trajectory, _NUM_HEAD_FIELDS) or codec.peek(value, Trajectory, 1)
        trajectory_id = fields.get("trajectory_id", "")
        if not is_id(trajectory_id):
            return
        try:
            outcomes = self.join.on_invalid(
                trajectory_id,
                time_ms=record.timestamp_ms,
                number=fields.get("number", -1),
                group_size=self._size_here(fields),
                detail=str(error),
            )
        except InvalidEvent:
            logger.debug("no trajectory id in %r, so no drop", trajectory_id)
            return
        self._settle(outcomes)

    def _size_here(self, fields: Mapping[str, object]) -> int:
        """The group size of a refused record, 0 when its group is none of this partition's."""
        group_id, size = str(fields["trajectory_id"]).rsplit(":", 2)[0], fields.get("group_size")
        home = partition_for(group_id.encode(), self._topics.partitions("trajectories"))
        is_here = home == self.partition and fields.get("group_id") == group_id
        return size if is_here and isinstance(size, int) else 0

    def dead_letter(self, record: Record, error: Exception) -> None:
        """Set a bad record aside, with its position and the reason."""
        self.join.counts["dead_letters"] += 1
        letter = dead_letter(
            record,
            f"{type(error).__name__}: {error}",
            reader=self._reader,
            now_ms=self.now_ms,
            max_bytes=self._settings.max_event_bytes,
        )
        self.out.event("dead_letters", letter)

    def _dead_letter_of(self, closed: Closed, slot: int, error: str, payload: Payload) -> None:
        (offset,) = (m.offset for m in closed.members if m.slot == slot)
        record = Record(
            self._trajectories,
            self.partition,
            offset,
            self.now_ms,
            closed.group_id.encode(),
            payload.value,
            payload.headers,
        )
        self.dead_letter(record, StreamrftError(error))
