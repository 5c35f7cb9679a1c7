"""Role leases on Kafka: one holder each, under an epoch that only rises, fenced by transactions.

The compacted topic `<namespace>.roles` holds, for the role `<namespace>.trainer`:

- key = role, value = `Claim`, written in a transaction of the id `<role>.claim`. Whoever means to
  claim initialises that id first, which fences every rival that is about to, and then reads again.
- key = `<role>/<epoch>`, value = `Beat`: renewed, or given up. Its time is the broker's.

A claim names the transactional id of its holder's writes. A successor initialises that id before
its own claim, so a holder that was paused meanwhile can commit nothing more, whenever it wakes.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic

from ...schemas.errors import Fenced, LogError, Timeout, UnknownTopic
from ...schemas.events import now_ms
from ..liveness import Identity, is_dead, this_process
from ..log import Lease, Partition
from .cluster import REQUEST_S, Cluster
from .consumer import KafkaConsumer
from .topics import Topics
from .writers import Idempotent, Outgoing, Transactional

_LOOK_INTERVAL_S = 0.1
_CLOCK_SKEW_MS = 10_000
_WRITE_MS = 15_000
_STALLED_S = 30.0
_TOPIC = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}


class Claim(msgspec.Struct, frozen=True):
    """A holder: the process, and the transactional id under which it writes."""

    epoch: int
    owner: str
    place: str
    pid: int
    started: float
    ttl_ms: int
    writer: str


class Beat(msgspec.Struct, frozen=True):
    """A sign of the holder: it goes on, or it gave the role up."""

    is_released: bool = False


class _Sign(NamedTuple):
    """The last word of a holder: when the broker and when this process heard it."""

    timestamp_ms: int
    seen: float
    is_released: bool


@dataclass
class _Role:
    """What the log says of one role."""

    claim: Claim | None = None
    sign: _Sign | None = None

    @property
    def is_free(self) -> bool:
        """Nobody holds it: never claimed, given up, dead, or silent for longer than its lease."""
        if self.claim is None or self.sign is None or self.sign.is_released:
            return True
        silent_ms = (time.monotonic() - self.sign.seen) * 1000
        # a lease that ended long ago by any clock need not be watched
        age_ms = now_ms() - self.sign.timestamp_ms - _CLOCK_SKEW_MS
        if max(silent_ms, age_ms) >= self.claim.ttl_ms:
            return True
        return is_dead(Identity(self.claim.place, self.claim.pid, self.claim.started))

    @property
    def holder(self) -> str:
        """Who holds it, in words."""
        assert self.claim is not None
        place = self.claim.place.partition("/")[0]
        return f"{self.claim.owner} (process {self.claim.pid} on {place}, epoch {self.claim.epoch})"


class Roles:
    """free -> held by an owner -> free (released, expired or dead), the epoch one higher."""

    def __init__(self, cluster: Cluster, topics: Topics, plain: Idempotent) -> None:
        self._cluster, self._topics, self._plain = cluster, topics, plain
        self._readers: dict[Partition, KafkaConsumer] = {}
        self._roles: dict[str, _Role] = {}
        self._writers: dict[tuple[str, int], Transactional] = {}

    def acquire(self, role: str, *, owner: str, ttl_ms: int, timeout_ms: int) -> Lease:
        """See `Log.acquire`."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            found = self._follow(role)
            if found.is_free:
                lease = self._take(role, owner, ttl_ms)
                if lease is not None:
                    return lease
            elif time.monotonic() >= deadline:
                raise Timeout(
                    f"role {role!r}, held by {found.holder}",
                    timeout_ms,
                    "It ends with that process, or when it stops renewing.",
                )
            time.sleep(min(_LOOK_INTERVAL_S, max(0.0, deadline - time.monotonic())))

    def renew(self, lease: Lease) -> None:
        """See `Log.renew`."""
        self.check(lease)
        self._say(lease, Beat())

    def release(self, lease: Lease) -> None:
        """See `Log.release`."""
        try:
            self.check(lease)
        except Fenced:
            return
        self._say(lease, Beat(is_released=True))

    def check(self, lease: Lease) -> None:
        """Raise Fenced unless the lease is still held, by the log as it is now."""
        found = self._follow(lease.role)
        claim, sign = found.claim, found.sign
        is_released = sign is None or sign.is_released
        if claim is None or claim.epoch != lease.epoch or is_released:
            owner = "nobody" if claim is None or is_released else claim.owner
            raise Fenced(
                f"role {lease.role!r}: {lease.owner} held it under epoch {lease.epoch}, now "
                f"{owner} does under {claim.epoch if claim else 0}. This process must end; its "
                "successor goes on."
            )

    def writer(self, lease: Lease) -> Transactional:
        """The transactions of a lease. Raises LogError when another connection acquired it."""
        found = self._writers.get((lease.role, lease.epoch))
        if found is None:
            raise LogError(
                f"role {lease.role!r}: only the connection that acquired the lease can write "
                "under it"
            )
        return found

    def close(self) -> None:
        """Stop reading."""
        for reader in self._readers.values():
            reader.abandon()

    # --- taking

    def _take(self, role: str, owner: str, ttl_ms: int) -> Lease | None:
        """Claim a role that looks free; None when a rival was faster."""
        with self._cluster.faults.explained(f"role {role!r}"):
            claiming = Transactional(self._cluster, f"{role}.claim")
            found = self._follow(role)
            if not found.is_free:
                return None
            before = found.claim
            writer = Transactional(self._cluster, f"{role}.{secrets.token_hex(6)}")
            if before is not None:
                Transactional(self._cluster, before.writer)
            epoch = before.epoch + 1 if before is not None else 1
            claim = Claim(epoch, owner, *this_process(), ttl_ms, writer.id)
            try:
                claiming.write([self._record(role, role.encode(), msgspec.msgpack.encode(claim))])
            except Fenced:
                return None
        self._await(role, claim)
        self._writers[role, epoch] = writer
        return Lease(role, owner, epoch, ttl_ms)

    def _await(self, role: str, claim: Claim) -> None:
        """A transaction is visible a moment after its commit was acknowledged."""
        deadline = time.monotonic() + _STALLED_S
        while self._follow(role).claim != claim:
            if time.monotonic() > deadline:
                raise LogError(f"role {role!r}: its claim of epoch {claim.epoch} does not appear")
            time.sleep(0.005)

    def _say(self, lease: Lease, beat: Beat) -> None:
        key = f"{lease.role}/{lease.epoch}".encode()
        record = self._record(lease.role, key, msgspec.msgpack.encode(beat))
        with self._cluster.faults.explained(f"role {lease.role!r}"):
            batch = self._plain.write([record], _WRITE_MS)
        for error in batch.errors.values():
            raise self._cluster.faults.translated(error, f"role {lease.role!r}")

    def _record(self, role: str, key: bytes, value: bytes) -> Outgoing:
        return Outgoing(_place(role).topic, 0, key, value, [], now_ms())

    # --- following

    def _follow(self, role: str) -> _Role:
        """Read the topic to its end."""
        place = _place(role)
        reader = self._reader(place)
        end = self._cluster.ends([place])[place]
        stalled_at = time.monotonic() + _STALLED_S
        while reader.positions()[place] < end:
            for record in reader.poll(1_000, 200):
                self._fold(record.key or b"", record.value or b"", record.timestamp_ms)
            if time.monotonic() > stalled_at:
                raise LogError(f"{place.topic}: its end {end} is out of reach")
        return self._roles.setdefault(role, _Role())

    def _fold(self, key: bytes, value: bytes, timestamp_ms: int) -> None:
        name, _, epoch = key.decode().partition("/")
        role = self._roles.setdefault(name, _Role())
        seen = time.monotonic()
        if not epoch:
            role.claim = msgspec.msgpack.decode(value, type=Claim)
            role.sign = _Sign(timestamp_ms, seen, False)
        elif role.claim is not None and int(epoch) == role.claim.epoch:
            beat = msgspec.msgpack.decode(value, type=Beat)
            role.sign = _Sign(timestamp_ms, seen, beat.is_released)

    def _reader(self, place: Partition) -> KafkaConsumer:
        found = self._readers.get(place)
        if found is None:
            self._ensure(place.topic)
            found = KafkaConsumer(self._cluster, self._topics)
            found.assign({place: self._cluster.begins([place])[place]})
            self._readers[place] = found
        return found

    def _ensure(self, topic: str) -> None:
        try:
            self._topics.get(topic)
            return
        except UnknownTopic:
            options = self._cluster.options
            wanted = NewTopic(topic, 1, options.replication, config={**_TOPIC, **options.topic})
            (future,) = self._cluster.admin.create_topics([wanted]).values()
        try:
            future.result(REQUEST_S)
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._cluster.faults.translated(raised.args[0], topic) from raised
        self._topics.await_topics([topic])


def _place(role: str) -> Partition:
    """Where a role's lease lies: beside the other topics of its namespace."""
    namespace, _, _ = role.rpartition(".")
    return Partition(f"{namespace or 'streamrft'}.roles", 0)
