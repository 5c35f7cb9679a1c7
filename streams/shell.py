"""What joins a worker to its log: where records come from, and how a batch becomes durable.

The native shell, on the log port alone, is here; `faust` has the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from ..schemas.errors import Fenced, MissingExtra, StreamrftError
from . import faults
from .log import Consumer, Partition
from .outbox import Outbox
from .process import Process
from .settings import StreamSettings

GROUP = "join"
SHARE = "a share of the partitions"


class Batch(NamedTuple):
    """What one partition wrote, and the next offsets that it stands at with that."""

    outbox: Outbox
    positions: dict[Partition, int]


class Shell(Protocol):
    """Where records come from, and how a batch becomes durable. Of the worker's thread."""

    @property
    def consumer(self) -> Consumer:
        """The worker's place in the group."""
        ...

    def claim(self, partition: int) -> None:
        """Called before a partition's state is read: no earlier owner can write it any more."""
        ...

    def commit(self, batches: Mapping[int, Batch]) -> dict[int, StreamrftError]:
        """Make batches durable, each with its positions; the error of each that is not."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What is seen of the shell itself."""
        ...

    def waits_for(self) -> str:
        """What a worker without partitions waits for, for people."""
        ...

    def close(self) -> None:
        """Leave the group at once."""
        ...


MakeShell = Callable[[Process], Shell]


def may_pass(error: StreamrftError) -> bool:
    """Whether a batch that ended so may be made again, here or by the partition's new owner."""
    return error.retriable or isinstance(error, Fenced)


def check_shell(settings: StreamSettings) -> None:
    """Raise MissingExtra when the shell's library is not installed here."""
    if settings.engine != "faust" or "faust" in sys.modules:
        return  # an imported one, which has no spec
    if find_spec("faust") is None:
        advice = " for Kafka's join workers, or set streams.engine: native"
        raise MissingExtra("faust-streaming", "faust", advice)


def shell_for(process: Process, settings: StreamSettings) -> Shell:
    """The shell that `settings.engine` names. Raises as `check_shell`."""
    if settings.engine == "native":
        return NativeShell(process)
    check_shell(settings)
    from .faust.shell import FaustShell

    return FaustShell(process)


class NativeShell:
    """The log port alone: outputs, state and the group's positions in one transaction."""

    def __init__(self, process: Process) -> None:
        log = process.log
        group = f"{process.topics.namespace}.{GROUP}"
        self.consumer: Consumer = log.consumer(group=group, member=process.name)
        self._producer = log.producer()

    def claim(self, partition: int) -> None:
        """See `Shell.claim`. The group's generation fences, when positions are committed."""

    def commit(self, batches: Mapping[int, Batch]) -> dict[int, StreamrftError]:
        """See `Shell.commit`. All batches in one transaction."""
        positions: dict[Partition, int] = {}
        try:
            with self._producer.transaction():
                for batch in batches.values():
                    batch.outbox.send_all(self._producer)
                    positions |= batch.positions
                faults.reach("join.before_commit")
                self._producer.send_positions(self.consumer, positions)
        except StreamrftError as error:
            if not may_pass(error):
                raise
            return dict.fromkeys(batches, error)
        return {}

    def metrics(self) -> Mapping[str, float]:
        """See `Shell.metrics`."""
        return {}

    def waits_for(self) -> str:
        """See `Shell.waits_for`. Who else holds the group is an error of the consumer."""
        return SHARE

    def close(self) -> None:
        """See `Shell.close`."""
        self.consumer.close()
        self._producer.close()
