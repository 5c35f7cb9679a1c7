"""Every use of what Faust and aiokafka do not promise to keep; for faust-streaming 0.15.3.

- A Faust consumer outside `exactly_once` reads uncommitted records, among them those of aborted
  transactions. Ours reads committed ones only.
- Faust commits the offsets it thinks were processed. Ours commits the positions of the state.
- Faust's consumer has a thread that a process waits for at its end. Ours is a daemon.
- What keeps a member out of its group aiokafka says to whoever asks, and does not try again
  before. Faust asks only once it has partitions; ours asks until then.
- Co-partitioned topics go to one worker only under Faust's own assignor, which it uses without
  tables while `table_standby_replicas` is not 0.

tests/contract/test_faust_internals.py fails when one of these changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode import Service
from mode.threads import WorkerThread

from ..log import Partition

VERSION = "0.15.3"
_FETCH_WAIT_MS = 100
_ASK_S = 3.0

Refused = Callable[[str], None]


class _DaemonThread(WorkerThread):
    def __init__(self, service: Any, **options: Any) -> None:
        super().__init__(service, **options)
        self.daemon = True


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    Worker = _DaemonThread

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        # an assignment waits for the fetch that is on its way
        consumer._fetch_max_wait_ms = _FETCH_WAIT_MS
        return consumer

    @Service.task
    async def _ask(self) -> None:
        while not self.should_stop:
            await self.sleep(_ASK_S)
            consumer: Any = self._consumer
            if consumer is None or consumer._coordinator is None or consumer.assignment():
                continue
            try:
                consumer._coordinator.check_errors()
            except KafkaError as error:
                transport: Any = self.consumer.transport
                transport.refused(repr(error))


class _Consumer(driver.Consumer):
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class CommittedTransport(driver.Transport):
    """Kafka as aiokafka reads it, without what was not committed."""

    Consumer = _Consumer

    def __init__(self, app: faust.App, refused: Refused) -> None:
        super().__init__(app.conf.broker_consumer, app)
        self.refused = refused


def read_committed(app: faust.App, refused: Refused) -> None:
    """Let an app that was not started read committed records only.

    `refused` is told, in a thread of Faust's, what keeps it out of its group.
    """
    app.transport = CommittedTransport(app, refused)


async def commit(app: faust.App, positions: Mapping[Partition, int]) -> None:
    """Store next offsets for the app's group. Partitions that it has no more are left out."""
    consumer: Any = app.consumer
    await consumer._commit({TP(*p): offset for p, offset in positions.items()})
