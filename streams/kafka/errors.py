"""Errors of librdkafka as errors of the port: what happened, and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from ...schemas.errors import (
    AccessDenied,
    ConfigError,
    Fenced,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    UnknownTopic,
)

_LOST = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError._FENCED,
    KafkaError._ASSIGNMENT_LOST,
}
_REFUSED_USER = {
    KafkaError._SSL,
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.ILLEGAL_SASL_STATE,
}
_MISSING_RIGHT = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
}
_UNKNOWN = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
# what a writer says of records that it gave up after its time-out
PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_AWAY = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._WAIT_COORD,
    KafkaError._NOENT,  # no leader is known now
    *PURGED,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.NOT_CONTROLLER,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.NETWORK_EXCEPTION,
    # a broker died with records of a batch: nothing of it counts, and a new one has new numbers
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
}
_FRESH_S = 15.0


class Faults:
    """What the connections of one log reported by themselves, to explain time-outs with."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._last: tuple[float, KafkaError] | None = None

    def heard(self, error: KafkaError) -> None:
        """`error_cb` of every client. A refused user is never overwritten by its time-outs."""
        if self._last is None or self._last[1].code() not in _REFUSED_USER:
            self._last = time.monotonic(), error

    @property
    def refused(self) -> KafkaError | None:
        """The error by which the brokers refused this user, if they did."""
        if self._last is not None and self._last[1].code() in _REFUSED_USER:
            return self._last[1]
        return None

    def translated(self, error: KafkaError, what: str) -> LogError | ConfigError:
        """The port's error for one of librdkafka; `what` says where."""
        code = error.code()
        if code in _AWAY and self.refused is not None:
            error, code = self.refused, self.refused.code()
        if code == KafkaError._SSL:
            return AccessDenied(
                f"{self.servers}: TLS fails ({_text(error)}). Check security.protocol and "
                "ssl.ca.location in event_log.options, and the names in the broker's certificate."
            )
        if code in _REFUSED_USER:
            return AccessDenied(
                f"{self.servers}: refuses the user or its secret ({_text(error)}). Check "
                "STREAMRFT_KAFKA_USERNAME, STREAMRFT_KAFKA_PASSWORD and the sasl and ssl options."
            )
        if code in _MISSING_RIGHT:
            return AccessDenied(
                f"{what}: a right on this {_MISSING_RIGHT[code]} is missing ({_text(error)}). "
                "Grant it to the user with kafka-acls, see docs."
            )
        if code in _UNKNOWN:
            return UnknownTopic(
                f"{what}: no such topic or partition on {self.servers}. Create topics with "
                "ensure_topics."
            )
        if code in _LOST:
            return Fenced(f"{what}: {_text(error)}. Another process holds it now.")
        if code in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            return OffsetOutOfRange(f"{what}: {_text(error)}")
        if code in _AWAY or error.retriable():
            return LogUnavailable(f"{what}: {_text(error)}. {self.why()}")
        return LogError(f"{what}: {_text(error)}")

    def why(self) -> str:
        """What the connections said last, for a message."""
        if self._last is not None and time.monotonic() - self._last[0] < _FRESH_S:
            return f"Last heard of {self.servers}: {_text(self._last[1])}."
        return f"The brokers are {self.servers}."

    @contextmanager
    def explained(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Translate what is raised inside."""
        try:
            yield
        except KafkaException as raised:
            error = raised.args[0]
            where = what if isinstance(what, str) else what()
            raise self.translated(error, where) from raised


def is_lost(error: KafkaError) -> bool:
    """Whether it says that a successor took over."""
    return error.code() in _LOST


def _text(error: KafkaError) -> str:
    if error.code() in PURGED:
        return "not acknowledged in time"
    return error.str().rstrip(". ")
