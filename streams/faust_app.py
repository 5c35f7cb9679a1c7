"""The join for Faust's own command, told by the environment which run it serves.

    STREAMRFT_CONFIG=run.yaml faust -A streamrft.streams.faust_app worker --without-web

`streamrft join` needs no such command: it runs the same application in a thread. Here Faust is
the process and the worker is the thread. One agent hands records to the worker (`JoinWorker`),
whose operators, state and transactions are those of the native shell.
STREAMRFT_NAME names the process, STREAMRFT_STAGE the stage of a run that has several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import faust
from click import ClickException

from ..schemas.errors import ConfigError, StreamrftError
from .faust.app import build
from .faust.exchange import Exchange
from .faust.membership import HostedFaust
from .faust.shell import FaustShell
from .kafka.options import Options
from .process import Process

Work = Callable[[Callable[[Process], FaustShell]], None]


def hosted(
    options: Options, group: str, topics: Sequence[str], work: Work, stop: Callable[[], None]
) -> faust.App:
    """The application with its worker in a thread beside it.

    Args:
        options: see `build`.
        group: see `build`.
        topics: see `build`.
        work: runs the worker, with the shell it is given, until `stop` is called; what it raises
            ends the application.
        stop: called from another thread.
    """
    exchange = Exchange()
    app = build(options, group, topics, exchange)

    def make_shell(process: Process) -> FaustShell:
        return FaustShell(process, HostedFaust(), exchange)

    @app.task
    async def join() -> None:
        working = asyncio.ensure_future(asyncio.to_thread(work, make_shell))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            stop()
            await working
            raise
        except Exception as error:  # the worker's failure is the application's
            await app.crash(error)

    return app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for found in entry_points(group="streamrft.hosted", name="join"):
        try:
            app = globals()["app"] = found.load()()
        except StreamrftError as error:  # Faust's command prints it, without where it was raised
            raise ClickException(str(error)) from error
        return app
    raise ConfigError("streamrft is not installed: run `pip install streamrft[faust]`.")
