"""Every role of one run on this machine: started, restarted, ended in order, judged by the log.

Exit code 0 means that the log holds the goal: every stage's last step and its full checkpoint; 2
that a process found the configuration wrong; 5 that the trainer could not save for too long.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Protocol

from ..consumers.checkpoints import CheckpointFailed
from ..schemas.errors import ConfigError, Fenced, LogError, LogUnavailable, StreamrftError, Timeout
from ..streams import faults
from ..streams.log import Lease, Log
from ..streams.process import Process
from .children import Child, command_of, describe, environment_of, kill_all, stop_in_order
from .goal import all_failed, judge
from .handover import is_kept, newest_full
from .plan import Run, Stage
from .preflight import check_places
from .views.place import was_started

LEASE_MS = 10_000
_LEASE_WAIT_MS = 1_000
_LOOK_S = 0.1
_SHOW_S = 0.5
_GRACE_S = 20.0
_LAST_WAIT_S = 30.0
_JUDGE_S = 2.0
_LOG_PAUSE_S = 1.0
_TELL_AGAIN_S = 60.0
_STOP_ORDER = ("schedule", "explore", "join", "train")
_WORKERS = ("join", "explore")


class Screen(Protocol):
    """Where the supervisor shows what goes on. Reads only the log."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def begin(self, log: Log, stage: Stage) -> None:
        """A stage begins."""
        ...

    def refresh(self, children: list[Child]) -> None:
        """Show the present state; called twice a second."""
        ...

    def end(self) -> None:
        """The stage ended."""
        ...


class Interrupted(StreamrftError):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}: every process ends its work; again ends them at once")
        self.number = number


class GaveUp(StreamrftError):
    """A process fails again and again, or the stage ended without its goal."""


class Misconfigured(GaveUp):
    """A process found that the configuration cannot be run."""

    exit_code = ConfigError.exit_code


class NotSaved(GaveUp):
    """The trainer could not save within its time."""

    exit_code = CheckpointFailed.exit_code


def supervise(run: Run, screen: Screen, *, only_stage: str | None = None) -> int:
    """Run all stages (or one) to their goals and return the exit code.

    Raises:
        ConfigError: the run exists and continue_from_checkpoint is false, or topics do not fit.
    """
    for warning in run.warnings:
        screen.say(f"warning: {warning}")
    log = run.open_log()
    try:
        _refuse_existing(run, log)
        _check_places(run, log, only_stage)
        return _Supervisor(run, log, screen).run(only_stage)
    finally:
        log.close()


class _Supervisor:
    """waiting for the lease -> running stage by stage -> ended."""

    def __init__(self, run: Run, log: Log, screen: Screen) -> None:
        self._run, self._log, self._screen = run, log, screen
        self._children: list[Child] = []
        self._signal = 0
        self._steps_seen = -1
        self._lease: Lease | None = None
        self._process: Process | None = None
        self._told_at: dict[str, float] = {}
        self._renewed = self._shown_at = self._judged_at = self._trained_at = 0.0

    def run(self, only_stage: str | None) -> int:
        self._catch_signals()
        try:
            self._acquire()
            for stage in self._run.stages:
                if only_stage in (None, stage.name):
                    self._run_stage(stage)
        except Interrupted as error:
            self._screen.say(str(error))
            self._stop_children()
            return 128 + error.number
        except (GaveUp, Fenced) as error:
            self._screen.say(f"failed: {error}")
            self._stop_children()
            return error.exit_code
        finally:
            kill_all(self._children)
            self._leave()
        return 0

    def _leave(self) -> None:
        """Show the last state and give the lease back; without the log it ends by itself."""
        try:
            self._screen.refresh(self._children)
            self._screen.end()
            if self._process is not None:
                self._process.ended()
            if self._lease is not None:
                self._log.release(self._lease)
        except LogUnavailable as error:
            self._tell_trouble(f"the log was not told that this supervisor ended: {error}")

    def _acquire(self) -> None:
        role = f"{self._run.namespace}.supervisor"
        try:
            self._lease = self._log.acquire(
                role, owner="streamrft run", ttl_ms=LEASE_MS, timeout_ms=_LEASE_WAIT_MS
            )
        except Timeout as error:
            raise GaveUp(
                f"this run runs already: {error.blocker}. Watch it with `streamrft status`, or "
                f"stop it first; if it is gone, its lease ends within {LEASE_MS // 1000} s."
            ) from None
        self._renewed = time.monotonic()

    def _run_stage(self, stage: Stage) -> None:
        label = f"stage {stage.name}" if stage.name else "run"
        self._log.ensure_topics(self._run.topic_specs(stage))
        if judge(self._log, stage).is_reached and self._is_worth_skipping(stage):
            self._check_trained(stage, label)
            self._check_result(stage, label)
            self._screen.say(f"{label}: reached its goal before; nothing to do{_how_on(stage)}")
            return
        self._begin(stage)
        while not self._has_ended(stage):
            try:
                self._turn(stage)
            except LogUnavailable as error:
                self._tell_trouble(f"the log does not answer, going on: {error}")
                time.sleep(_LOG_PAUSE_S)
        self._stop_children()
        verdict = judge(self._log, stage)
        assert self._process is not None
        self._process.ended()
        self._screen.refresh(self._children)
        self._screen.end()
        if not verdict.is_reached:
            raise GaveUp(f"{label}: ended without its goal: {verdict.missing}")
        self._check_trained(stage, label)
        self._screen.say(f"{label}: done{self._outcome(stage)}")

    def _begin(self, stage: Stage) -> None:
        self._children = [
            Child(spec, stage.job_dir / "log" / f"{spec.name}.log") for spec in stage.processes()
        ]
        self._steps_seen, self._trained_at = -1, 0.0
        self._screen.begin(self._log, stage)
        self._process = Process(self._log, stage.topics, name="supervisor", role="supervisor")
        for child in self._children:
            child.start(command_of(self._run, stage, child.spec), environment_of(stage, child.spec))
        faults.reach("supervisor.started")

    def _is_worth_skipping(self, stage: Stage) -> bool:
        """Rows over epochs are done when their trainer says so, or when the next stage began."""
        if not stage.is_sft or stage.trainer is None or stage.trainer.total_steps is not None:
            return True
        stages = self._run.stages
        return any(was_started(self._log, s) for s in stages[stages.index(stage) + 1 :])

    def _check_trained(self, stage: Stage, label: str) -> None:
        """A goal of epochs is also reached where every task was rolled out in vain."""
        if why := all_failed(self._log, stage):
            raise GaveUp(
                f"{label}: trained nothing: {why}. Mend that and give the run another name: on "
                "this log every task is done. `streamrft tail drops` shows the others."
            )

    def _check_result(self, stage: Stage, label: str) -> None:
        """What the run was for may have been removed; weights of stages before it may go."""
        saved = newest_full(self._log, stage.topics)
        if stage is self._run.stages[-1] and saved is not None and not is_kept(saved):
            raise GaveUp(
                f"{label}: reached its goal before, and the log ({self._run.log_url}) says so for "
                f"good, but its checkpoint {saved.uri} is gone. Put the folder back, or give the "
                "run another name to begin anew."
            )

    def _turn(self, stage: Stage) -> None:
        """One look at everything, about ten times a second."""
        now = time.monotonic()
        self._check_signal()
        self._renew()
        assert self._process is not None
        self._process.alive({"restarts": float(sum(c.num_restarts for c in self._children))})
        for child in self._children:
            code = child.ended()
            if code is not None:
                self._on_end(stage, child, code)
            elif child.process is None and not child.is_done and now >= child.start_at:
                child.start(
                    command_of(self._run, stage, child.spec), environment_of(stage, child.spec)
                )
        if now - self._shown_at >= _SHOW_S:
            self._shown_at = now
            self._screen.refresh(self._children)
        time.sleep(_LOOK_S)

    def _on_end(self, stage: Stage, child: Child, code: int) -> None:
        if code == 0 and child.spec.command not in _WORKERS:
            verdict = judge(self._log, stage) if child.spec.command == "train" else None
            if verdict is None or verdict.is_reached:
                child.is_done = True
                return
        steps = self._num_steps(stage)
        if steps != self._steps_seen:
            self._steps_seen = steps
            for other in self._children:
                other.failures.clear()
        for end in (Misconfigured, NotSaved):
            if code == end.exit_code:
                raise end(_last_words(child, code))
        if not child.restart_later(code):
            raise GaveUp(_last_words(child, code))
        wait_s = max(0.0, child.start_at - time.monotonic())
        self._screen.say(
            f"{child.spec.name} ended ({child.cause(code)}); starts again in {wait_s:.1f} s"
        )

    def _num_steps(self, stage: Stage) -> int:
        """End of train_steps: it moves when training goes on."""
        name = stage.topics.name("train_steps")
        return sum(self._log.describe([name])[name].end.values())

    def _has_ended(self, stage: Stage) -> bool:
        """Whether the processes that end by themselves have done so."""
        by_command = {c.spec.command: c for c in self._children}
        if "train" not in by_command:
            now = time.monotonic()
            if not by_command["schedule"].is_done or now - self._judged_at < _JUDGE_S:
                return False
            self._judged_at = now
            return judge(self._log, stage).is_reached
        if not by_command["train"].is_done:
            return False
        scheduler = by_command.get("schedule")
        if scheduler is None or scheduler.is_done:
            return True
        self._trained_at = self._trained_at or time.monotonic()
        return time.monotonic() - self._trained_at > _LAST_WAIT_S

    def _tell_trouble(self, text: str) -> None:
        """Say it, but not again within a minute."""
        now = time.monotonic()
        if now - self._told_at.get(text, -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
            self._told_at[text] = now
            self._screen.say(text)

    def _stop_children(self) -> None:
        stop_in_order(self._children, _STOP_ORDER, _GRACE_S, self._keep_lease)

    def _keep_lease(self) -> None:
        """While everything ends: a lease lost now changes nothing any more."""
        try:
            self._renew()
        except LogError:
            self._lease = None

    def _renew(self) -> None:
        now = time.monotonic()
        if self._lease is not None and now - self._renewed > LEASE_MS / 3000:
            self._log.renew(self._lease)
            self._renewed = now

    def _catch_signals(self) -> None:
        def on_signal(number: int, frame: object) -> None:
            if self._signal:
                kill_all(self._children)
                os._exit(128 + number)
            self._signal = number

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup and background jobs ignore some on purpose
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)

    def _check_signal(self) -> None:
        if self._signal:
            raise Interrupted(self._signal)

    def _outcome(self, stage: Stage) -> str:
        saved = newest_full(self._log, stage.topics)
        return f", step {saved.step}, checkpoint {saved.uri}" if saved else ""


def _how_on(stage: Stage) -> str:
    """More epochs are no new goal: the log says once and for all that no task comes any more."""
    if stage.trainer is None or stage.trainer.total_steps is not None:
        return ""
    return ". To train on, set buffer.total_steps"


def _last_words(child: Child, code: int) -> str:
    lines = "\n".join(f"  | {line}" for line in child.last_lines() or [child.last_error()])
    how = f"{child.spec.name} ended with {describe(code)}"
    if len(child.failures) > 1:
        how += f", {len(child.failures)} times without progress"
    return f"{how}. Its last lines ({child.log_path}):\n{lines}"


def _check_places(run: Run, log: Log, only_stage: str | None) -> None:
    """Before the first stage begins, also of those after it; what began once had what it reads."""
    for stage in run.stages:
        if only_stage in (None, stage.name) and not was_started(log, stage):
            for command in stage.commands:
                check_places(stage, command)


def _refuse_existing(run: Run, log: Log) -> None:
    if run.config.continue_from_checkpoint:
        return
    if any(was_started(log, stage) for stage in run.stages):
        raise ConfigError(
            f"continue_from_checkpoint: false, but {run.job_dir} holds a run already. Give it "
            "another name, or set continue_from_checkpoint: true to go on."
        )
