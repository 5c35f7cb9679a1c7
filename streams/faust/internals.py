"""Every use of what Faust and aiokafka do not promise to keep; for faust-streaming 0.15.3.

- A Faust consumer outside `exactly_once` reads uncommitted records, among them those of aborted
  transactions. Ours reads committed ones only.
- Faust commits the offsets it thinks were processed. Ours commits the positions of the state.
- Faust's consumer has a thread that a process waits for at its end. Ours is a daemon.
- Co-partitioned topics go to one worker only under Faust's own assignor, which it uses without
  tables while `table_standby_replicas` is not 0.

tests/contract/test_faust_internals.py fails when one of these changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.threads import WorkerThread

from ..log import Partition

VERSION = "0.15.3"
_FETCH_WAIT_MS = 100


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


class _Consumer(driver.Consumer):
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class CommittedTransport(driver.Transport):
    """Kafka as aiokafka reads it, without what was not committed."""

    Consumer = _Consumer


def read_committed(app: faust.App) -> None:
    """Let an app that was not started read committed records only."""
    app.transport = CommittedTransport(app.conf.broker_consumer, app)


async def commit(app: faust.App, positions: Mapping[Partition, int]) -> None:
    """Store next offsets for the app's group. Partitions that it has no more are left out."""
    consumer: Any = app.consumer
    await consumer._commit({TP(*p): offset for p, offset in positions.items()})
