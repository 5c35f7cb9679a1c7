"""The live panel of a run in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...streams.log import Log
from ..children import Child
from ..plan import Stage
from .display import dropped, goal_text, sparkline
from .progress import Progress

_SILENT_S = 15.0
_STYLES = {
    "alive": "green",
    "idle": "yellow",
    "ended": "dim",
    "silent": "bold red",
    "starting": "cyan",
    "restarting": "bold red",
    "done": "green",
    "stopped": "dim",
}


class LiveScreen:
    """idle -> showing one stage (the panel is redrawn in place) -> idle, its last state left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._began = 0.0
        self._restore_terminal: Callable[[], None] = lambda: None

    def say(self, text: str) -> None:
        """A line above the panel, in the terminal's history."""
        style = "yellow" if text.startswith("warning:") else None
        style = "bold red" if text.startswith("failed:") else style
        self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def begin(self, log: Log, stage: Stage) -> None:
        """Open the panel."""
        self.end()
        self._progress = Progress(log, stage)
        self._began = time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        self._restore_terminal = hide_control_echo()

    def refresh(self, children: list[Child]) -> None:
        """Redraw the panel."""
        if self._live is None or self._progress is None:
            return
        self._progress.refresh()
        self._live.update(self._panel(children), refresh=True)

    def end(self) -> None:
        """Close the panel; its last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._restore_terminal()

    def _panel(self, children: list[Child]) -> RenderableType:
        progress = self._progress
        assert progress is not None
        width = min(self._console.width, 110)
        spent = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._began))
        branch = "" if progress.branch == "main" else f"  branch {progress.branch}"
        return Panel(
            Group(_numbers(progress, width), Text(""), _processes(progress, children)),
            title=f"[bold]{progress.stage.namespace}[/]  {goal_text(progress.stage)}{branch}",
            title_align="left",
            subtitle=spent,
            subtitle_align="right",
            width=width,
            border_style="blue",
        )


def hide_control_echo() -> Callable[[], None]:
    """Keep the terminal from writing ^C into the panel; returns what undoes it."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        return lambda: None
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    return lambda: termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _numbers(progress: Progress, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=9)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    total = progress.stage.trainer.total_steps if progress.stage.trainer else None
    step = Text(f"{progress.step}", style="bold")
    step.append(f" of {total}" if total else "", style="dim")
    if progress.saved:
        step.append(f"   last full checkpoint {progress.saved.step}", style="dim")
    grid.add_row("step", step)
    if (reward := progress.metric("reward/mean")) is not None:
        curve = sparkline(progress.curve("reward/mean"), max(10, width - 36))
        grid.add_row("reward", Text.assemble((f"{reward:7.3f}  ", "bold"), (curve, "green")))
    if (loss := progress.metric("actor/loss")) is not None:
        grid.add_row("loss", f"{loss:.5g}")
    grid.add_row("speed", _speed(progress))
    if progress.stage.streams:
        grid.add_row("staleness", _staleness(progress))
        grid.add_row("pending", _pending(progress))
        grid.add_row("dropped", dropped(progress) or "none")
    return grid


def _speed(progress: Progress) -> str:
    tokens = progress.metric("perf/tokens_per_s")
    length = progress.metric("response_length/mean")
    parts = [f"{tokens:,.0f} tokens/s" if tokens is not None else ""]
    parts.append(f"{length:,.0f} tokens a response" if length is not None else "")
    return " · ".join(filter(None, parts)) or "no step yet"


def _staleness(progress: Progress) -> str:
    mean = progress.metric("sample/staleness_mean")
    most = progress.metric("sample/staleness_max")
    allowed = progress.stage.trainer.max_staleness if progress.stage.trainer else None
    shown = (
        f"{mean:.2g} on average, {most:.0f} at most"
        if mean is not None and most is not None
        else ""
    )
    bound = f"{allowed} allowed" if allowed is not None else ""
    return " · ".join(filter(None, (shown, bound)))


def _pending(progress: Progress) -> str:
    return (
        f"{progress.tasks_left} tasks · {progress.unjoined} to join · "
        f"{progress.waiting_for_rewards} waiting for rewards · {progress.ready} ready to train"
    )


def _processes(progress: Progress, children: list[Child]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("process", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("waits for", ratio=1, overflow="ellipsis", no_wrap=True)
    for child in children:
        table.add_row(*_process_row(progress, child))
    return table


def _process_row(progress: Progress, child: Child) -> tuple[RenderableType, ...]:
    beat, age_s = progress.processes.get(child.spec.name), progress.age_s(child.spec.name)
    mine = child.process is not None and beat is not None and beat.pid == child.process.pid
    if child.is_done:
        state = "done"
    elif child.is_stopped:
        state = "stopped"
    elif child.process is None:
        state = "restarting"
    elif not mine or beat is None or age_s is None:
        state = "starting"
    else:
        state = "silent" if age_s > _SILENT_S else beat.state
    waits = beat.waiting_for if beat and mine and state == "idle" else ""
    if state == "silent" and age_s is not None:
        waits = f"no heartbeat for {age_s:.0f} s"
    if state == "restarting":
        waits = child.last_error()
    if child.num_restarts and not waits:
        waits = f"restarts: {child.num_restarts}"
    memory = beat.metrics.get("resident_bytes") if beat and mine else None
    size = f"{memory / 2**20:,.0f} MB" if memory else ""
    return child.spec.name, Text(state, style=_STYLES.get(state, "")), size, waits
