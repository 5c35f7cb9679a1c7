"""The Faust application of a join worker: one agent over the topics that it joins."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faust

from ..kafka.options import RECORD_MARGIN_BYTES, Options
from ..log import Partition, Record
from . import internals
from .exchange import Exchange
from .security import credentials

_COMMIT_INTERVAL_S = 1.0
_METADATA_AGE_MS = 3_000
_FULL_S = 0.01
# records that Faust keeps besides those of the exchange, whatever their size
_BUFFERED = 64
_RAW = {"key_type": bytes, "value_type": bytes, "key_serializer": "raw", "value_serializer": "raw"}


def build(options: Options, group: str, topics: Sequence[str], exchange: Exchange) -> faust.App:
    """The application of one worker. It must be started where it was built: it has an event loop.

    Args:
        options: addresses, rights and limits of the log.
        group: consumer group, which is the application's id.
        topics: full names, with as many partitions each.
        exchange: where records go and positions come from.
    """
    app = faust.App(group, **_settings(options))
    internals.read_committed(app, exchange.refuse)
    source = app.topic(*topics, acks=False, **_RAW)

    @app.agent(source, name=f"{group}.agent")
    async def join(stream: Any) -> None:
        async for event in stream.noack().events():
            exchange.put(_record(event.message))
            while exchange.is_full:
                await asyncio.sleep(_FULL_S)

    async def on_assigned(app: faust.App, assigned: Any, **_: Any) -> None:
        exchange.assign(Partition(*at) for at in assigned)

    signal: Any = app.on_partitions_assigned
    signal.connect(on_assigned)

    @app.timer(_COMMIT_INTERVAL_S)
    async def store_positions() -> None:
        positions = exchange.noted()
        if positions and not app.rebalancing:
            await internals.commit(app, positions)

    return app


def _settings(options: Options) -> dict[str, Any]:
    session_s = options.session_timeout_ms / 1000
    return {
        "broker": [f"kafka://{server}" for server in options.servers.split(",")],
        "broker_credentials": credentials(options),
        "broker_session_timeout": session_s,
        "broker_rebalance_timeout": session_s,
        "broker_heartbeat_interval": min(3.0, session_s / 3),
        "consumer_auto_offset_reset": "earliest",
        # a leader that assigns before a restarted broker knows the topics gives nobody anything
        # until it looks again
        "consumer_metadata_max_age_ms": _METADATA_AGE_MS,
        "consumer_max_fetch_size": options.max_event_bytes + RECORD_MARGIN_BYTES,
        "cython_optimizations": True,
        # made by Faust although nothing is kept there; other users have their own
        "datadir": Path(tempfile.gettempdir()) / f"streamrft-faust-{os.getuid()}",
        "store": "memory://",
        "stream_buffer_maxsize": _BUFFERED,
        "stream_wait_empty": False,
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "web_enabled": False,
        "worker_redirect_stdouts": False,
    }


def _record(message: Any) -> Record:
    headers = message.headers or ()
    pairs = headers.items() if isinstance(headers, dict) else headers
    return Record(
        message.topic,
        message.partition,
        message.offset,
        round(message.timestamp * 1000),
        message.key,
        message.value,
        tuple((name, value or b"") for name, value in pairs),
    )
