"""What a person sees while a run goes on: a live panel in a terminal, else one line a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ...schemas import events as ev
from ...streams.log import Log
from ..children import Child
from ..plan import Stage
from .progress import Progress

if TYPE_CHECKING:
    from ..supervisor import Screen

_SILENCE_MS = 60_000
_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def screen_for(stream: TextIO, *, plain: bool) -> Iterator[Screen]:
    """The live panel where `stream` is a terminal, else lines."""
    if plain or not stream.isatty():
        yield PlainScreen(stream)
        return
    from .live import LiveScreen

    screen = LiveScreen()
    try:
        yield screen
    finally:
        screen.end()


def _where(stage: Stage, progress: Progress) -> str:
    """Where training goes on: on a branch that is about to begin, or after the last step."""
    asked = stage.trainer
    if asked is not None and asked.resume_from and asked.branch != progress.branch:
        return f", branch {asked.branch} from {asked.resume_from}"
    return f", going on after step {progress.step}" if progress.step else ""


class PlainScreen:
    """One line a step, for files and pipes; without a step, at times what is waited for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Progress | None = None
        self._last_step_ms = self._silence_ms = 0

    def say(self, text: str) -> None:
        """One line at once."""
        print(text, file=self._stream, flush=True)

    def begin(self, log: Log, stage: Stage) -> None:
        """Name the stage, its goal and where its files are."""
        self._last_step_ms, self._silence_ms = ev.now_ms(), _SILENCE_MS
        self._progress = Progress(log, stage)
        at = _where(stage, self._progress)
        self.say(f"{stage.namespace}: {goal_text(stage)}{at}; logs in {stage.job_dir / 'log'}")

    def refresh(self, children: list[Child]) -> None:
        """A line for each step done since the last call."""
        if self._progress is None:
            return
        self._progress.refresh()
        for step in self._progress.new_steps:
            seconds = (step.produced_at - self._last_step_ms) / 1000
            self._last_step_ms, self._silence_ms = step.produced_at, _SILENCE_MS
            self.say(step_line(step, self._progress, seconds))
        silent_ms = ev.now_ms() - self._last_step_ms
        if silent_ms >= self._silence_ms:
            self._silence_ms *= 2
            if line := waiting_line(self._progress, silent_ms / 1000):
                self.say(line)

    def end(self) -> None:
        """Forget the stage."""
        self._progress = None


def goal_text(stage: Stage) -> str:
    """What a stage goes for."""
    kind = stage.config.algorithm.algorithm_type
    if stage.trainer is None:
        return "exploring"
    if stage.trainer.total_steps:
        return f"{kind}, {stage.trainer.total_steps} steps"
    epochs = stage.config.buffer.total_epochs
    return f"{kind}, {epochs} epoch{'s' if epochs > 1 else ''}"


def step_line(step: ev.TrainStep, progress: Progress, seconds: float) -> str:
    """`step 3/10  reward 0.41  loss ...`; what was not measured is left out."""
    assert progress.stage.trainer is not None
    total = progress.stage.trainer.total_steps
    parts = [f"step {step.step}/{total}" if total else f"step {step.step}"]
    for label, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "actor/loss", "{:.4g}"),
        ("staleness", "sample/staleness_mean", "{:.2g}"),
        ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
    ):
        if (value := step.metrics.get(name)) is not None:
            parts.append(f"{label} {form.format(value)}")
    if progress.stage.streams:
        parts.append(f"pending {pending(progress)}")
    parts.append(f"{seconds:.1f} s")
    return "  ".join(parts)


def waiting_line(progress: Progress, seconds: float) -> str:
    """What every idle process waits for, and what was dropped; empty where nothing is known."""
    beats = sorted(progress.processes.items())
    parts = [f"{name} waits for {b.waiting_for}" for name, b in beats if b.state == "idle"]
    if progress.drops:
        parts.append(f"dropped {dropped(progress)}")
    return "  ".join([f"no step for {seconds:.0f} s", *parts]) if parts else ""


def dropped(progress: Progress) -> str:
    """Drops by their reasons."""
    return " · ".join(f"{n} {reason}" for reason, n in sorted(progress.drops.items()))


def pending(progress: Progress) -> int:
    """Trajectories without a final state."""
    return progress.unjoined + progress.waiting_for_rewards + progress.ready


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars, averaged to fit; a flat line when they are all the same."""
    if not values or width < 1:
        return ""
    buckets = min(width, len(values))
    edges = [i * len(values) // buckets for i in range(buckets + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return _BARS[3] * len(means)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in means)
