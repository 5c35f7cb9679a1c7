"""What `event_log: kafka://...` and its options mean: addresses, rights, sizes and time-outs.

`options` are librdkafka properties, passed on as they are, and four kinds of our own:
`replication` (a number; the broker's default when absent), `topic.<name>` (a property of every
topic that is created, such as `topic.min.insync.replicas`), `connect_timeout_ms`, and
`session_timeout_ms` (after which a silent member of a group loses its partitions).
Secrets come from the environment only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...schemas.errors import ConfigError
from ..log import Limits

# key, headers and the frame of a batch lie beside the value; librdkafka's batch.size is below it
RECORD_MARGIN_BYTES = 2**20
SECRETS = {
    "STREAMRFT_KAFKA_USERNAME": "sasl.username",
    "STREAMRFT_KAFKA_PASSWORD": "sasl.password",
    "STREAMRFT_KAFKA_SSL_KEY_PASSWORD": "ssl.key.password",
    "STREAMRFT_KAFKA_SSL_KEYSTORE_PASSWORD": "ssl.keystore.password",
    "STREAMRFT_KAFKA_OAUTH_CLIENT_ID": "sasl.oauthbearer.client.id",
    "STREAMRFT_KAFKA_OAUTH_CLIENT_SECRET": "sasl.oauthbearer.client.secret",
}
_SECRET = {name: variable for variable, name in SECRETS.items()} | {
    "ssl.key.pem": "ssl.key.location (a file)",
    "sasl.jaas.config": "STREAMRFT_KAFKA_USERNAME and STREAMRFT_KAFKA_PASSWORD",
}
_OURS = frozenset(
    "acks auto.offset.reset bootstrap.servers client.id enable.auto.commit "
    "enable.auto.offset.store enable.idempotence enable.partition.eof group.id "
    "group.instance.id isolation.level "
    "max.in.flight.requests.per.connection max.poll.interval.ms message.max.bytes partitioner "
    "partition.assignment.strategy group.remote.assignor session.timeout.ms transactional.id "
    "receive.message.max.bytes fetch.max.bytes".split()
)
_DEFAULT_CONNECT_MS = 10_000
_TRANSACTION_MS, _MEMBER_TRANSACTION_MS = 10_000, 5_000
_REQUEST_MS = 10_000


@dataclass(frozen=True)
class Options:
    """One log's settings. `base` is what every client of it is made with.

    `member_transactions`: beside `producing`, for transactions without a role. What a killed
    member of a group left open holds up its successor until it times out.
    """

    servers: str
    base: Mapping[str, str]
    producing: Mapping[str, str]
    member_transactions: Mapping[str, str]
    consuming: Mapping[str, str]
    topic: Mapping[str, str]
    replication: int
    group_protocol: str | None
    max_event_bytes: int
    session_timeout_ms: int
    connect_timeout_ms: int

    @classmethod
    def of(cls, url: str, limits: Limits) -> Options:
        """From the URL, the limits with their options, and the environment.

        Raises:
            ConfigError: a secret or a property of our own among the options, or a wrong number.
        """
        servers = _servers(url)
        given = dict(limits.options)
        _refuse_owned(given)
        replication = _number(given, "replication", -1)
        connect_ms = _number(given, "connect_timeout_ms", _DEFAULT_CONNECT_MS)
        session_ms = _number(given, "session_timeout_ms", limits.session_timeout_ms)
        protocol = given.pop("group.protocol", None)
        prefix = "topic."
        topic = {
            n.removeprefix(prefix): given.pop(n)
            for n in list(given)
            if n.startswith(prefix) and not n.startswith("topic.metadata.")
        }
        record_bytes = limits.max_event_bytes + RECORD_MARGIN_BYTES
        return cls(
            servers=servers,
            base={"bootstrap.servers": servers, **_defaults(given), **given, **_secrets()},
            producing=_producing(record_bytes, given),
            member_transactions=_member_transactions(given),
            consuming=_consuming(record_bytes, given),
            topic=topic,
            replication=replication,
            group_protocol=protocol,
            max_event_bytes=limits.max_event_bytes,
            session_timeout_ms=session_ms,
            connect_timeout_ms=connect_ms,
        )


def _servers(url: str) -> str:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            "event_log: a user in the kafka:// URL; name it in STREAMRFT_KAFKA_USERNAME and "
            "STREAMRFT_KAFKA_PASSWORD."
        )
    if not parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(
            f"event_log: {url!r} found; write kafka://host:9092[,host2:9092] and nothing behind it."
        )
    for server in parts.netloc.split(","):
        port = server.rpartition(":")[2] if ":" in server.rpartition("]")[2] else ""
        if port and not (port.isdecimal() and 0 < int(port) < 65_536):
            raise ConfigError(f"event_log: port {port!r} in {url}; 1 to 65535 is allowed.")
    return parts.netloc


def _refuse_owned(options: Mapping[str, str]) -> None:
    for name in options:
        if name in _SECRET:
            raise ConfigError(
                f"event_log.options.{name}: a secret in the file; set {_SECRET[name]} instead."
            )
        if name in _OURS:
            raise ConfigError(
                f"event_log.options.{name}: set by streamrft itself, since its promises rest on "
                "it; take it out."
            )


def _number(options: dict[str, str], name: str, usual: int) -> int:
    value = options.pop(name, None)
    if value is None:
        return usual
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"event_log.options.{name}: {value!r}; a whole number is needed"
        ) from None


def _secrets() -> dict[str, str]:
    return {name: os.environ[v] for v, name in SECRETS.items() if os.environ.get(v)}


def _defaults(given: Mapping[str, str]) -> dict[str, str]:
    found = {"client.id": "streamrft", "socket.timeout.ms": str(_REQUEST_MS)}
    found |= {"socket.keepalive.enable": "true", "reconnect.backoff.max.ms": "2000"}
    found |= {"topic.metadata.propagation.max.ms": "1000"}
    if os.environ.get("STREAMRFT_KAFKA_USERNAME"):
        found |= {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
        if "sasl.mechanisms" in given:
            del found["sasl.mechanism"]
    return found


def _producing(record_bytes: int, given: Mapping[str, str]) -> dict[str, str]:
    found = {
        "enable.idempotence": "true",
        "acks": "all",
        "partitioner": "murmur2_random",
        "message.max.bytes": str(record_bytes),
    }
    usual = {
        "compression.type": "zstd",
        "linger.ms": "5",
        # a transaction waits this long for the markers of the one before; it grows to a second
        "retry.backoff.ms": "5",
        "transaction.timeout.ms": str(_TRANSACTION_MS),
    }
    if "transaction.timeout.ms" in given and "socket.timeout.ms" not in given:
        found["socket.timeout.ms"] = given["transaction.timeout.ms"]  # librdkafka: not longer
    return found | {n: v for n, v in usual.items() if n not in given}


def _member_transactions(given: Mapping[str, str]) -> dict[str, str]:
    names = ("transaction.timeout.ms", "socket.timeout.ms")  # librdkafka: the latter not longer
    if any(name in given for name in names):
        return {}
    return dict.fromkeys(names, str(_MEMBER_TRANSACTION_MS))


def _consuming(record_bytes: int, given: Mapping[str, str]) -> dict[str, str]:
    fetch_bytes = max(50 * 2**20, record_bytes)
    # a new assignment waits for the fetch that is on its way
    usual = {"fetch.wait.max.ms": "100", "fetch.error.backoff.ms": "100"}
    return {n: v for n, v in usual.items() if n not in given} | {
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "enable.partition.eof": "true",
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "message.max.bytes": str(record_bytes),
        "fetch.max.bytes": str(fetch_bytes),
        "receive.message.max.bytes": str(fetch_bytes + 2**20),
    }
