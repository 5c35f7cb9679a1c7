"""`streamrft status`: where every trajectory of a run is; exit 1 when one is nowhere or twice."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from ...schemas import events as ev
from ...schemas.events import now_ms
from ...streams.log import Log
from ...streams.reading import read_events
from ..goal import judge
from ..handover import failed_save, newest_full
from ..plan import Stage
from .count import Counting
from .ledger import TRAINED, Balance
from .place import opened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_DEAD_AFTER_S = 15.0
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Status:
    """One stage as the log has it."""

    stage: Stage
    balance: Balance
    branch: str
    step: int
    reward: float | None
    saved: ev.Checkpoint | None
    unsaved: ev.SaveFailed | None
    missing: str
    processes: tuple[ev.Heartbeat, ...]
    now_ms: int

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        balance = self.balance
        return {
            "namespace": self.stage.namespace,
            "stage": self.stage.name,
            "balanced": balance.is_balanced,
            "goal_reached": not self.missing,
            "missing": self.missing,
            "branch": self.branch,
            "step": self.step,
            "total_steps": self.stage.trainer.total_steps if self.stage.trainer else None,
            "reward_mean": self.reward,
            "checkpoint": {"step": self.saved.step, "uri": self.saved.uri} if self.saved else None,
            "save_failed": _failed(self.unsaved) if self.unsaved else None,
            "produced": balance.produced,
            "states": dict(balance.states),
            "pending": {"total": balance.pending.total, **asdict(balance.pending)},
            "rewards": dict(balance.reward_counts),
            "repeats": balance.num_repeats,
            "amended": balance.num_amended,
            "forgotten": balance.num_forgotten,
            "dead_letters": balance.num_dead_letters,
            "faults": list(balance.faults),
            "processes": [
                {
                    "name": beat.process,
                    "state": state_of_process(beat, self.now_ms),
                    "waiting_for": beat.waiting_for,
                    "age_s": round((self.now_ms - beat.produced_at) / 1000, 1),
                    "pid": beat.pid,
                    "host": beat.host,
                    "metrics": beat.metrics,
                }
                for beat in self.processes
            ],
        }


def command(args: argparse.Namespace) -> int:
    """Print the status of the named stage, or of all that were started."""
    with opened(args.config, args.stage) as place:
        stages = [place.stage] if args.stage is not None else place.started
        found = [status_of(place.log, stage, anew=args.full) for stage in stages]
    balanced = all(s.balance.is_balanced for s in found)
    if args.json:
        last = found[-1].plain()
        more = {"stages": [s.plain() for s in found]} if len(found) > 1 else {}
        print(json.dumps(last | more | {"balanced": balanced}))
    else:
        from rich.console import Console

        # a pipe has no width: nothing may be wrapped for it
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        for status in found:
            _show(console, status)
    return 0 if balanced else 1


def status_of(log: Log, stage: Stage, *, anew: bool = False) -> Status:
    """Read everything that `status` tells."""
    counting = Counting(log, stage, anew=anew)
    balance = counting.update()
    steps = [
        e
        for e in read_events(log, stage.topics, "train_steps")
        if isinstance(e, ev.TrainStep) and counting.lineage.contains(e.branch, e.step)
    ]
    last = max(steps, key=lambda s: s.step, default=None)
    beats: dict[str, ev.Heartbeat] = {}
    for beat in read_events(log, stage.topics, "heartbeats"):
        assert isinstance(beat, ev.Heartbeat)
        beats[beat.process] = beat
    return Status(
        stage,
        balance,
        counting.lineage.branch,
        last.step if last else 0,
        last.metrics.get("reward/mean") if last else None,
        newest_full(log, stage.topics),
        failed_save(log, stage.topics),
        judge(log, stage).missing,
        tuple(sorted(beats.values(), key=lambda b: b.process)),
        now_ms(),
    )


def state_of_process(beat: ev.Heartbeat, at_ms: int) -> str:
    """alive, idle or ended as it said itself; dead when it went silent without ending."""
    if beat.state == "ended":
        return "ended"
    silent = (at_ms - beat.produced_at) / 1000 > _DEAD_AFTER_S
    gone = beat.host == socket.gethostname() and not psutil.pid_exists(beat.pid)
    return "dead" if silent or gone else beat.state


def sum_line(balance: Balance) -> str:
    """`96 produced = 64 trained + 8 dropped + 24 pending`, or how it does not come out."""
    trained = balance.states[TRAINED]
    dropped = sum(balance.states.values()) - trained
    pending, forgotten = balance.pending.total, balance.num_forgotten
    sign = "=" if balance.produced == trained + dropped + pending + forgotten else "≠"
    told = f"{balance.produced} produced {sign} {trained} trained + {dropped} dropped + "
    return f"{told}{pending} pending" + (f" + {forgotten} deleted" if forgotten else "")


def _failed(event: ev.SaveFailed) -> dict[str, Any]:
    return {"step": event.step, "kind": event.kind, "uri": event.uri, "reason": event.reason}


def _show(console: Console, status: Status) -> None:
    from rich.markup import escape
    from rich.table import Table

    balance, stage = status.balance, status.stage
    total = stage.trainer.total_steps if stage.trainer else None
    step = f"step {status.step}" + (f" of {total}" if total else "")
    branch = "" if status.branch == "main" else f", branch {status.branch}"
    console.print(f"[bold]{stage.namespace}[/]  {step}{branch}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("goal", status.missing or "reached")
    if status.reward is not None:
        grid.add_row("reward", f"{status.reward:.4g} at the last step")
    if status.saved:
        grid.add_row("checkpoint", f"step {status.saved.step}, {status.saved.uri}")
    if (failed := status.unsaved) is not None:
        since = _ago((status.now_ms - failed.produced_at) / 1000)
        told = f"{failed.kind} of step {failed.step} since {since}: {escape(failed.reason)}"
        grid.add_row("not saved", f"[bold red]{told}[/]")
    if stage.streams is not None:
        _add_counts(grid, status)
    console.print(grid)
    _show_processes(console, status)
    _show_verdict(console, balance)


def _add_counts(grid: Table, status: Status) -> None:
    balance = status.balance
    ended = {k: n for k, n in balance.states.items() if n or k == TRAINED}
    grid.add_row("ended", _counts(ended))
    grid.add_row(
        "pending",
        f"{balance.pending.unjoined} to join · {balance.pending.open} waiting for rewards · "
        f"{balance.pending.ready} ready to train",
    )
    grid.add_row("rewards", _counts({k: n for k, n in balance.reward_counts.items() if n}))
    others = {"dead letters": balance.num_dead_letters, "repeats": balance.num_repeats}
    others["amendments"] = balance.num_amended
    others["ends deleted by retention"] = balance.num_forgotten
    left_out = sum(beat.metrics.get("faust/gap_records", 0) for beat in status.processes)
    others["records that Faust had not brought, read from the log"] = int(left_out)
    if any(others.values()):
        grid.add_row("beside", _counts({k: n for k, n in others.items() if n}))


def _show_processes(console: Console, status: Status) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not status.processes:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "state", "last heard of", "waits for"):
        table.add_column(column, no_wrap=column != "waits for")
    styles = {"dead": "bold red", "alive": "green", "idle": "yellow", "ended": "dim"}
    for beat in status.processes:
        state = state_of_process(beat, status.now_ms)
        age = _ago((status.now_ms - beat.produced_at) / 1000)
        waits = beat.waiting_for if state == "idle" else ""
        if status.unsaved and state == "ended" and beat.role == "trainer":
            waits = "nothing: it ended unsaved, see above"
        table.add_row(beat.process, f"[{styles[state]}]{state}[/]", age, escape(waits))
    console.print(table)


def _show_verdict(console: Console, balance: Balance) -> None:
    if balance.is_balanced:
        console.print(f"[green]balanced[/]  {sum_line(balance)}")
        return
    console.print(f"[bold red]not balanced[/]  {sum_line(balance)}")
    for fault in balance.faults[:_SHOWN_FAULTS]:
        console.print(f"  {fault}", markup=False)
    if more := len(balance.faults) - _SHOWN_FAULTS:
        console.print(f"  and {more} more (--json has all)") if more > 0 else None


def _counts(counts: dict[str, int]) -> str:
    return " · ".join(f"{n:,} {name}" for name, n in counts.items()) or "none"


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s ago"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min ago"
    return time.strftime("%m-%d %H:%M", time.localtime(time.time() - seconds))
