"""Reading from Kafka: as a member of a group, or partitions named by the reader."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from ...schemas.errors import Fenced, LogError, LogUnavailable, OffsetOutOfRange
from ..log import Partition, Record
from .buffer import Buffer
from .cluster import Cluster
from .membership import Membership, Rebalanced
from .topics import Topics

_FIRST_WORD_S = 0.1
_SLICE_S = 0.5
_FETCH = 1_000
_SEEK_S = 1.0
_COMMIT_S = 10.0
_LOOK_S, _SILENCE_S = 2.0, 60.0
READERS = "streamrft-readers"


class KafkaConsumer:
    """See `Consumer`.

    Records are drained from librdkafka into a bounded buffer, which serves partitions fairly and
    makes `pause` cheap. Offsets are checked against the log before the first read from them.
    """

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        group: str | None = None,
        member: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._topics = cluster, topics
        self._group, self._member, self._settings = group, member, settings or {}
        self._client: Consumer | None = None
        self._subscribed: tuple[str, ...] = ()
        self._membership: Membership | None = None
        self._buffer = Buffer()
        self._held: set[Partition] = set()
        self._unchecked: set[Partition] = set()
        self._unheard: set[Partition] = set()
        self._moved = False
        self._looked = self._answered = time.monotonic()
        self.is_closed = False

    def is_on(self, cluster: Cluster) -> bool:
        """Whether it reads through this connection."""
        return self._cluster is cluster

    # --- what is read

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: Rebalanced | None = None,
        on_revoke: Rebalanced | None = None,
    ) -> None:
        """See `Consumer.subscribe`. The group is joined by the first `poll`."""
        if self._group is None:
            raise LogError("subscribe: this consumer has no group; use assign, or name a group")
        if self._subscribed or self.assignment():
            raise LogError(f"group {self._group!r}: this consumer reads already; open another")
        counts = {name: self._topics.get(name).num_partitions for name in topics}
        if len(set(counts.values())) != 1:
            raise LogError(
                f"group {self._group!r}: topics with different numbers of partitions cannot be "
                f"read together ({counts}). Read each in its own group."
            )
        self._subscribed = tuple(sorted(counts))
        self._membership = Membership(
            self._cluster,
            self,
            self._group,
            self._member,
            self._subscribed,
            (on_assign, on_revoke),
        )
        self._client = self._membership.join()

    def assign(self, positions: Mapping[Partition, int], *, is_checked: bool = False) -> None:
        """See `Consumer.assign`. A second call replaces the first."""
        if self._subscribed:
            raise LogError(f"group {self._group!r}: a subscribed consumer cannot assign")
        self._topics.demand(positions)
        client = self._reader()
        self._buffer.clear()
        self._held.clear()
        for partition, offset in positions.items():
            self.begin(Partition(*partition), offset)
        if is_checked:
            self._unchecked.clear()
        client.assign([TopicPartition(*p, offset) for p, offset in positions.items()])

    def _reader(self) -> Consumer:
        if self._client is None:
            wanted = {"group.id": self._group or READERS, **self._settings}
            self._client = self._cluster.consumer(wanted)
        return self._client

    def begin(self, partition: Partition, offset: int) -> None:
        """Read a partition from `offset` on, which is checked before."""
        self._buffer.begin(partition, offset)
        self._unchecked.add(partition)
        self._unheard.add(partition)

    def assignment(self) -> list[Partition]:
        """See `Consumer.assignment`."""
        return sorted(self._buffer)

    def positions(self) -> dict[Partition, int]:
        """See `Consumer.positions`."""
        return {p: self._buffer.next(p) for p in self._buffer}

    def seek(self, partition: Partition, offset: int) -> None:
        """See `Consumer.seek`."""
        self._demand_assigned(partition)
        deadline = time.monotonic() + _SEEK_S
        while True:
            try:
                self._reader().seek(TopicPartition(*partition, offset))
                break
            except KafkaException:  # it is not fetched yet: a moment after its assignment
                if time.monotonic() > deadline:
                    self._fetch_anew(partition, offset)
                    break
                time.sleep(0.005)
        self.begin(Partition(*partition), offset)

    def _fetch_anew(self, partition: Partition, offset: int) -> None:
        """Once the log refused an offset, librdkafka fetches no more there, nor does it seek."""
        client, at = self._reader(), TopicPartition(*partition, offset)
        if self._membership is not None and self._membership.is_incremental:
            client.incremental_unassign([at])
            client.incremental_assign([at])
            return
        others = {p: next_ for p, next_ in self.positions().items() if p != partition}
        for other, next_ in others.items():
            self.begin(other, next_)
        client.assign([at, *(TopicPartition(*p, next_) for p, next_ in others.items())])

    def pause(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.pause`. Fetching stops only when much of it waits already."""
        for partition in partitions:
            self._demand_assigned(partition)
            self._buffer.paused.add(Partition(*partition))

    def resume(self, partitions: Iterable[Partition]) -> None:
        """See `Consumer.resume`."""
        wanted = {Partition(*p) for p in partitions}
        self._buffer.paused -= wanted
        fetched_again = [TopicPartition(*p) for p in self._held & wanted]
        if fetched_again:
            self._reader().resume(fetched_again)
        self._held -= wanted

    def _demand_assigned(self, partition: Partition) -> None:
        if partition not in self._buffer:
            raise LogError(f"{partition.topic}[{partition.partition}]: is not assigned")

    # --- reading

    def poll(self, max_records: int = 500, timeout_ms: int = 0) -> list[Record]:
        """See `Consumer.poll`."""
        if self.is_closed:
            raise LogError("poll: this consumer is closed; open another")
        deadline = time.monotonic() + timeout_ms / 1000
        first_word = min(deadline, time.monotonic() + _FIRST_WORD_S)
        self._moved = False
        while True:
            self._drain()
            self._check_offsets()
            now = time.monotonic()
            is_heard = now >= first_word or not self._buffer.unheard(self._unheard)
            if self._buffer.has_records and (is_heard or self._buffer.is_full):
                return self._buffer.serve(max_records)
            if now >= deadline or (self._moved and not self._buffer.has_records):
                records = self._buffer.serve(max_records)
                self._look(has_records=bool(records))
                return records
            until = deadline if is_heard else first_word
            self._wait(min(_SLICE_S, until - now))

    def _wait(self, timeout_s: float) -> None:
        message = self._reader().poll(max(0.0, timeout_s))
        self._raise_failure()
        if message is not None:
            self._take_in(message)

    def _drain(self) -> None:
        """Take over what librdkafka has, without waiting, as far as there is room."""
        while not self._buffer.is_full:
            messages = self._reader().consume(_FETCH, 0)
            self._raise_failure()
            for message in messages:
                self._take_in(message)
            if len(messages) < _FETCH:
                break
        else:
            self._wait(0.0)  # it has to hear that this member lives
        overfull = set(self._buffer.overfull()) - self._held
        if overfull:
            self._reader().pause([TopicPartition(*p) for p in overfull])
            self._held |= overfull

    def _look(self, *, has_records: bool) -> None:
        """Now and then, while nothing comes, ask whether topics and brokers are still there."""
        now = time.monotonic()
        if has_records:
            self._looked = self._answered = now
        elif now - self._looked >= _LOOK_S:
            self._looked = now
            try:
                self._topics.demand_present({p.topic for p in self._buffer})
                self._answered = now
            except LogUnavailable:
                if now - self._answered > _SILENCE_S:
                    raise

    def _take_in(self, message: Any) -> None:
        error = message.error()
        if error is None:
            partition = self._buffer.take_in(message)
            if partition is not None:
                self._unheard.discard(partition)
        elif error.code() == KafkaError._PARTITION_EOF:
            partition = Partition(message.topic(), message.partition())
            self._unheard.discard(partition)
            self._moved |= self._buffer.reach(partition, message.offset())
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._unchecked.add(Partition(message.topic(), message.partition()))
        else:
            self._on_error(message, error)

    def _on_error(self, message: Any, error: KafkaError) -> None:
        if error.code() == KafkaError._MAX_POLL_EXCEEDED:
            return  # the shares are lost, which the callback says
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and self._group is None:
            return  # a reader without group needs no right on one
        if _says(error, KafkaError.UNRELEASED_INSTANCE_ID) and self._membership is not None:
            if self._membership.may_wait():
                self._join_anew()
                return
        if _says(error, KafkaError.UNRELEASED_INSTANCE_ID, KafkaError.FENCED_INSTANCE_ID):
            raise LogError(
                f"group {self._group!r}: another living process is member {self._member!r} "
                f"({error.str()}). Names of processes must differ within a run."
            )
        if _says(error, KafkaError.GROUP_ID_NOT_FOUND, KafkaError.INCONSISTENT_GROUP_PROTOCOL):
            raise LogError(
                f"{self._named()}: the group is held by members of another protocol "
                f"({error.str()}). Workers of both values of streams.engine cannot share it: stop "
                "the others, or take their --engine."
            )
        where = f"{message.topic()}[{message.partition()}]" if message.topic() else self._named()
        translated = self._cluster.faults.translated(error, where)
        if not translated.retriable:
            if message.topic():
                self._topics.forget(message.topic())
            raise translated

    def _join_anew(self) -> None:
        """With a new client; shares of the old one are gone, which the owner hears."""
        assert self._client is not None and self._membership is not None
        self._client.close()
        self._membership.lose(self.assignment())
        self._client = self._membership.join()

    def _check_offsets(self) -> None:
        """Positions that were never read from must lie on the log."""
        asked = [p for p in self._unchecked if p in self._buffer]
        self._unchecked.clear()
        if not asked:
            return
        begins = self._cluster.begins(asked)
        highest = self._cluster.highest(asked)
        for partition in asked:
            at, begin, end = self._buffer.next(partition), begins[partition], highest[partition]
            if not begin <= at <= end:
                self._unchecked.update(asked)
                raise OffsetOutOfRange(
                    f"{partition.topic}[{partition.partition}]@{at}: the log keeps {begin} to "
                    f"{end - 1}. Seek to one of these, or to {end} for what comes."
                )

    # --- the group

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Read these no more: they go to another member."""
        for partition in partitions:
            self._buffer.end(partition)
            for places in (self._buffer.paused, self._held, self._unchecked, self._unheard):
                places.discard(partition)

    def credentials(self, positions: Mapping[Partition, int]) -> Any:
        """What a transaction proves its membership with. Raises Fenced for a lost partition."""
        self._demand_owned(positions)
        return self._reader().consumer_group_metadata()

    def _demand_owned(self, positions: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise LogError("commit: this consumer has no group; name one to store positions")
        if not self._subscribed:
            return
        for partition in positions:
            if partition not in self._buffer:
                raise Fenced(
                    f"{self._named()}: partition {partition.topic}[{partition.partition}] is not "
                    "its own any more; another member reads on from the committed position."
                )

    def _named(self) -> str:
        return f"group {self._group!r}, member {self._member!r}"

    def commit(self, positions: Mapping[Partition, int]) -> None:
        """See `Consumer.commit`."""
        if not positions:
            return
        self._demand_owned(positions)
        places = [TopicPartition(*p, offset) for p, offset in positions.items()]
        deadline = time.monotonic() + _COMMIT_S
        while True:
            try:
                with self._cluster.faults.explained(
                    lambda: f"{self._named()}: commit of a partition"
                ):
                    for at in self._reader().commit(offsets=places, asynchronous=False):
                        if at.error is not None:
                            raise KafkaException(at.error)
                return
            except Fenced as error:
                if not self._is_passing(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _is_passing(self, error: Fenced) -> bool:
        """The member's epoch moved while the commit was on its way: it is still a member."""
        cause = error.__cause__
        return isinstance(cause, KafkaException) and cause.args[0].code() in (
            KafkaError.STALE_MEMBER_EPOCH,
        )

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """See `Consumer.committed`."""
        if self._group is None:
            raise LogError("committed: this consumer has no group; name one")
        wanted = [Partition(*p) for p in partitions]
        self._topics.demand(wanted)
        member = self._client if self._subscribed else None
        return self._cluster.committed(self._group, wanted, member)

    def close(self) -> None:
        """See `Consumer.close`. A member with a name keeps its shares for its session."""
        if self.is_closed:
            return
        try:
            if self._client is not None:
                self._client.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the group without a callback."""
        self.is_closed = True
        if self._membership is not None:
            self._membership.silence()
        client, self._client = self._client, None
        if client is not None:
            with suppress(RuntimeError):  # closed already
                client.close()
        self._buffer.clear()

    def _raise_failure(self) -> None:
        """What went wrong inside a callback of the group, once a new membership is begun."""
        failure = self._membership.take_failure() if self._membership is not None else None
        if failure is not None:
            self._join_anew()
            raise failure


def _says(error: KafkaError, *codes: int) -> bool:
    """Whether it is one of these, also where librdkafka wraps it as fatal."""
    return any(error.code() == code or KafkaError(code).str() in error.str() for code in codes)
