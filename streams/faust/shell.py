"""Faust's shell of the join worker: its records, and a transaction a partition that fences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...schemas.errors import ConfigError, StreamrftError
from .. import faults
from ..kafka.log import KafkaLog
from ..kafka.producer import KafkaProducer
from ..log import Partition
from ..process import Process
from ..reading import committed
from ..shell import GROUP, SHARE, Batch, may_pass
from .app import build
from .consumer import FaustConsumer
from .exchange import Exchange
from .membership import EmbeddedFaust, Membership


class FaustShell:
    """See `Shell`.

    Each partition has a transactional id. A successor takes it before it reads the state, so that
    a worker that was paused, or does not know yet that its partition went, cannot write any more.
    """

    def __init__(
        self,
        process: Process,
        membership: Membership | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`membership`, `exchange`: of an application that runs already."""
        if not isinstance(process.log, KafkaLog):
            raise ConfigError(
                "--engine faust: this run's log is not Kafka, which is all that Faust reads. "
                "Leave the option out."
            )
        self._log = process.log
        self._group = f"{process.topics.namespace}.{GROUP}"
        self._exchange = exchange = exchange or Exchange()
        membership = membership or EmbeddedFaust(
            partial(build, self._log.options, self._group), exchange
        )
        self._check_rights(process)
        self.consumer = FaustConsumer(self._log, membership, exchange)
        self._producers: dict[int, KafkaProducer] = {}

    def _check_rights(self, process: Process) -> None:
        """Ask as a member would: Faust waits in silence for a right that it does not have.

        Raises:
            AccessDenied: on the group, or a topic.
        """
        committed(self._log, self._group, [Partition(process.topics.name("trajectories"), 0)])

    def claim(self, partition: int) -> None:
        """See `Shell.claim`."""
        self._producers.pop(partition, None)
        self._producers[partition] = self._log.successor(f"{self._group}.{partition}")

    def commit(self, batches: Mapping[int, Batch]) -> dict[int, StreamrftError]:
        """See `Shell.commit`. One transaction a partition; its positions are in the state."""
        failed: dict[int, StreamrftError] = {}
        for partition, batch in batches.items():
            producer = self._producers[partition]
            try:
                with producer.transaction():
                    batch.outbox.send_all(producer)
                    faults.reach("join.before_commit")
            except StreamrftError as error:
                if not may_pass(error):
                    raise
                failed[partition] = error
            else:
                self.consumer.commit(batch.positions)
        return failed

    def metrics(self) -> Mapping[str, float]:
        """See `Shell.metrics`. Gaps are what Faust did not bring and the log had."""
        return {f"faust/{name}": float(num) for name, num in self.consumer.metrics.items()}

    def waits_for(self) -> str:
        """See `Shell.waits_for`. Faust itself waits in silence."""
        if not (refusal := self._exchange.refusal):
            return SHARE
        return (
            f"{SHARE}; the group {self._group!r} refuses Faust ({refusal}). If workers of another "
            "value of streams.engine hold it, stop them, or take their --engine"
        )

    def close(self) -> None:
        """See `Shell.close`."""
        self.consumer.close()
        self._producers.clear()
