"""The join as a Faust application: one agent over the topics that it joins.

`streamrft join` runs it in a thread beside the worker. Faust's own command runs it too, told by
STREAMRFT_CONFIG (the run's YAML file) and, if wanted, STREAMRFT_NAME:

    STREAMRFT_CONFIG=run.yaml faust -A streamrft.streams.faust_app worker --without-web

The agent hands records to the worker (`worker.JoinWorker`), whose operators, state and
transactions are those of the native shell; positions are the worker's own (`faust.consumer`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import faust

from ..schemas.errors import ConfigError
from .faust import internals
from .faust.exchange import Exchange
from .faust.membership import HostedFaust, Membership
from .faust.security import credentials
from .kafka.options import RECORD_MARGIN_BYTES, Options
from .log import Partition, Record

_COMMIT_INTERVAL_S = 1.0
_FULL_S = 0.01
_RAW = {"key_type": bytes, "value_type": bytes, "key_serializer": "raw", "value_serializer": "raw"}

Work = Callable[[Membership, Exchange], None]


def build(options: Options, group: str, topics: Sequence[str], exchange: Exchange) -> faust.App:
    """The application of one worker. It must be started where it was built: it has an event loop.

    Args:
        options: addresses, rights and limits of the log.
        group: consumer group, which is the application's id.
        topics: full names, with as many partitions each.
        exchange: where records go and positions come from.
    """
    session_s = options.session_timeout_ms / 1000
    app = faust.App(
        group,
        broker=[f"kafka://{server}" for server in options.servers.split(",")],
        broker_credentials=credentials(options),
        broker_session_timeout=session_s,
        broker_rebalance_timeout=session_s,
        broker_heartbeat_interval=min(3.0, session_s / 3),
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=options.max_event_bytes + RECORD_MARGIN_BYTES,
        cython_optimizations=True,
        datadir=Path(tempfile.gettempdir()) / "streamrft-faust",
        store="memory://",
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        worker_redirect_stdouts=False,
    )
    internals.read_committed(app)
    source = app.topic(*topics, acks=False, **_RAW)

    @app.agent(source, name=f"{group}.agent")
    async def join(stream: Any) -> None:
        async for event in stream.noack().events():
            exchange.put(_record(event.message))
            while exchange.is_full:
                await asyncio.sleep(_FULL_S)

    @app.on_partitions_assigned.connect
    async def on_assigned(app: faust.App, assigned: Any, **_: Any) -> None:
        exchange.assign(Partition(*at) for at in assigned)

    @app.timer(_COMMIT_INTERVAL_S)
    async def store_positions() -> None:
        positions = exchange.noted()
        if positions and not app.rebalancing:
            await internals.commit(app, positions)

    return app


def hosted(
    options: Options, group: str, topics: Sequence[str], work: Work, stop: Callable[[], None]
) -> faust.App:
    """The application for Faust's own command: the worker runs in a thread beside it.

    Args:
        options, group, topics: see `build`.
        work: runs the worker until `stop` is called; what it raises ends the application.
        stop: called from another thread.
    """
    exchange = Exchange()
    app = build(options, group, topics, exchange)

    @app.task
    async def work_beside() -> None:
        working = asyncio.ensure_future(asyncio.to_thread(work, HostedFaust(), exchange))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            stop()
            await working
            raise
        except Exception as error:  # the worker's failure is the application's
            await app.crash(error)

    return app


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


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for found in entry_points(group="streamrft.hosted", name="join"):
        app = globals()["app"] = found.load()()
        return app
    raise ConfigError("streamrft is not installed: run `pip install streamrft[faust]`.")
