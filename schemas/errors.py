"""Every error that streamrft raises on purpose, with one root and a `retriable` flag.

A message says where and what was found, against what was allowed, then what to do.
"""

from __future__ import annotations


class StreamrftError(Exception):
    """Root of the errors of this package. `retriable`: the same call may succeed later.

    `exit_code` is what a command ends with.
    """

    retriable = False
    exit_code = 1


class InvalidEvent(StreamrftError, ValueError):
    """An event breaks its contract; `field` names the place inside it."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class UndecodableRecord(StreamrftError, ValueError):
    """Bytes of a record are no event: unknown schema, truncated, or not JSON that fits."""


class EventTooLarge(StreamrftError, ValueError):
    """An encoded event is over the size limit of its topic."""

    def __init__(self, name: str, size_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"{name}: {size_bytes:,} bytes encoded, the limit is {max_bytes:,}. Put large payloads "
            "into object storage (storage.uri) or raise event_log.max_event_bytes."
        )
        self.size_bytes, self.max_bytes = size_bytes, max_bytes


class ConfigError(StreamrftError, ValueError):
    """The configuration cannot be run; the message names the key and the mend."""

    exit_code = 2


class MissingExtra(StreamrftError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str, advice: str = "") -> None:
        super().__init__(f'{what} is not installed. Run: pip install "streamrft[{extra}]"{advice}')


class LogError(StreamrftError):
    """The log refused or could not do an operation."""


class LogUnavailable(LogError):
    """The log does not answer now: locked, or no broker. The caller backs off and retries."""

    retriable = True


class AccessDenied(LogError):
    """The log refuses this user: wrong credentials, or a right that is missing."""


class UnknownTopic(LogError, ValueError):
    """A topic does not exist on this log."""


class OffsetOutOfRange(LogError, ValueError):
    """A position lies before the first kept record or after the end of its partition."""


class Fenced(LogError):
    """A successor holds this role or partition: the caller must stop and write nothing."""


class StorageUnavailable(StreamrftError):
    """An object beside the log cannot be read or written now; the message names its URI."""

    retriable = True


class StorageCorrupt(StreamrftError):
    """An object's bytes are not those that an event vouches for."""


class StorageGone(StorageCorrupt):
    """An object that an event names is not there, though its store answers."""


class Timeout(StreamrftError, TimeoutError):
    """A wait reached its deadline; `blocker` names what it waited for."""

    def __init__(self, blocker: str, timeout_ms: int, advice: str = "") -> None:
        super().__init__(f"waited {timeout_ms / 1000:g} s for {blocker}. {advice}".strip())
        self.blocker, self.timeout_ms = blocker, timeout_ms
