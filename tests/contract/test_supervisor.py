"""The supervisor: restarts what dies, gives up on what cannot live, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cli_run import Cli, append, cli_with_topics, cut
from waiting import until

from streamrft.deploy.children import MAX_FAILURES, MAX_SAME_FAILURES, Child, environment_of
from streamrft.deploy.cli import main
from streamrft.deploy.goal import Verdict, dead_groups, judge
from streamrft.deploy.parent import PARENT_VARIABLE
from streamrft.deploy.plan import ProcessSpec, plan
from streamrft.deploy.supervisor import Interrupted, supervise
from streamrft.deploy.views.place import was_started
from streamrft.schemas import events as ev
from streamrft.schemas.errors import LogUnavailable, StreamrftError
from streamrft.streams.lineage import Lineage, surviving_lineage

CONFIG: dict[str, Any] = {
    "mode": "explore",
    "project": "p",
    "name": "n",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
    "model": {"model_path": "m", "max_model_len": 64},
    "buffer": {
        "total_steps": 2,
        "explorer_input": {"taskset": {"name": "rows", "path": "rows.jsonl"}},
    },
    "explorer": {"rollout_model": {"engine_type": "transformers"}},
    "streams": {"workers": 2},
}


@dataclass
class Supervised:
    """`streamrft run` in explore mode: nobody trains, so its children wait for weights for ever."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}?", "response": str(i)}) + "\n" for i in range(8))
        )
        own = {"checkpoint_root_dir": str(self.folder / "runs")}
        taskset = {"name": "rows", "path": str(self.folder / "rows.jsonl")}
        buffer = {"total_steps": 2, "explorer_input": {"taskset": taskset}}
        self.config.write_text(json.dumps(CONFIG | own | {"buffer": buffer}))

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "streamrft.deploy.cli", "run", "-c", str(self.config)]
        process = subprocess.Popen(
            [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.processes.append(process)
        return process

    def children(self, command: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_ours = str(self.config) in words and "--name" in words
            if is_ours and command in " ".join(words):
                found.append(process)
        return found

    def started(self) -> subprocess.Popen[str]:
        process = self.start()
        until(lambda: len(self.children()) == 4, "four children")
        return process

    def end(self) -> None:
        while self.processes:
            process = self.processes.pop()
            process.kill()
            process.wait(60)
            assert process.stdout
            process.stdout.close()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(tmp_path)
    yield found
    found.end()
    until(lambda: not found.children(), "end of the children after the test")


def test_nobody_outlives_a_killed_supervisor_not_even_a_stopped_child(
    supervised: Supervised,
) -> None:
    process = supervised.started()
    (stopped,) = supervised.children(" schedule ")
    stopped.suspend()
    process.kill()
    process.wait(60)
    until(lambda: not supervised.children(), "end of all children")
    assert supervised.children() == []


def test_where_the_kernel_does_not_help_a_closed_pipe_ends_the_child() -> None:
    script = (
        "import sys, time\n"
        "from streamrft.deploy.parent import die_with_parent\n"
        "sys.platform = 'darwin'\n"
        "die_with_parent()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()


def test_a_killed_child_is_named_and_started_again(supervised: Supervised) -> None:
    process = supervised.started()
    before = {p.pid for p in supervised.children(" join ")}
    victim = supervised.children("join-1")[0]
    victim.kill()
    until(
        lambda: len({p.pid for p in supervised.children(" join ")} - before) == 1,
        "another join worker",
    )
    out = assert_ends_by(signal.SIGTERM, supervised, process)
    assert "join-1 ended (killed by SIGKILL); starts again in 0.5 s" in out


def test_a_signal_ends_all_in_order_and_shows_in_the_exit_code(supervised: Supervised) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = supervised.started()
    log_folder = supervised.folder / "runs" / "p" / "n" / "log"
    until(lambda: len(list(log_folder.glob("*.log"))) == 4, "logs of the children")
    time.sleep(1.5)
    assert_ends_by(signal.SIGINT, supervised, process)


def assert_ends_by(
    number: signal.Signals, supervised: Supervised, process: subprocess.Popen[str]
) -> str:
    """What it printed."""
    process.send_signal(number)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in out
    assert not supervised.children()
    return out


def test_a_run_has_one_supervisor(supervised: Supervised) -> None:
    first = supervised.started()
    second = supervised.start()
    out, _ = second.communicate(timeout=150)
    assert second.returncode == 1
    assert f"process {first.pid}" in out
    assert "failed: this run runs already: role 'p.n.supervisor', held by streamrft run (p" in out
    assert len(supervised.children()) == 4


def test_the_successor_of_a_killed_supervisor_takes_over_at_once(supervised: Supervised) -> None:
    first = supervised.started()
    first.kill()
    first.wait(60)
    second = supervised.start()
    until(lambda: len(supervised.children()) == 4, "four new children")
    assert second.poll() is None


class Lines:
    """A screen that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.say = self.said.append

    def begin(self, log: object, stage: object) -> None: ...

    def refresh(self, children: object) -> None: ...

    def end(self) -> None: ...


def test_a_run_whose_epochs_are_done_says_how_to_train_on(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(supervised.config.read_text()) | {"mode": "both"}
    del config["buffer"]["total_steps"]
    supervised.config.write_text(json.dumps(config))
    lines = Lines()
    monkeypatch.setattr("streamrft.deploy.supervisor.judge", lambda log, stage: Verdict())
    monkeypatch.setattr("streamrft.deploy.supervisor._Supervisor._catch_signals", lambda self: None)
    assert supervise(plan(supervised.config), lines) == 0
    assert lines.said == [
        "run: reached its goal before; nothing to do. To train on, set buffer.total_steps"
    ]


def test_a_reached_goal_whose_checkpoint_was_removed_says_what_to_do(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = tmp_path / "global_step_1", Lines()
    saved = ev.Checkpoint(
        branch="main", step=1, kind="full", uri=str(folder), digest="d" * 64,
        manifest_sha256="e" * 64, epoch=1, produced_at=ev.now_ms(),
    )  # fmt: skip
    with cli.place() as place:
        append(place, "checkpoints", saved)
    monkeypatch.setattr("streamrft.deploy.supervisor.judge", lambda log, stage: Verdict())
    monkeypatch.setattr("streamrft.deploy.supervisor._Supervisor._catch_signals", lambda self: None)
    assert supervise(plan(cli.config), lines) == 1
    (said,) = lines.said
    assert f"its checkpoint {folder} is gone" in said and "another name to begin anew" in said
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    lines.said.clear()
    assert supervise(plan(cli.config), lines) == 0
    assert lines.said == ["run: reached its goal before; nothing to do"]


def test_a_full_disk_is_told_once_and_a_signal_still_shows_in_the_exit_code(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, lines = iter(range(5)), Lines()

    def turn(self: object, stage: object) -> None:
        if next(turns, None) is None:
            raise Interrupted(signal.SIGTERM)
        raise LogUnavailable("log.db: the disk is full")

    def cannot(*args: object) -> None:
        raise LogUnavailable("log.db: the disk is full")

    monkeypatch.setattr("streamrft.deploy.supervisor._LOG_PAUSE_S", 0)
    monkeypatch.setattr("streamrft.deploy.supervisor._Supervisor._turn", turn)
    monkeypatch.setattr("streamrft.deploy.supervisor._Supervisor._catch_signals", lambda self: None)
    monkeypatch.setattr("streamrft.deploy.supervisor.Child.start", lambda *args: None)
    monkeypatch.setattr("streamrft.deploy.supervisor.Process.ended", cannot)
    assert supervise(plan(supervised.config), lines) == 128 + signal.SIGTERM
    assert sum("going on: log.db: the disk is full" in line for line in lines.said) == 1
    assert lines.said[-1].startswith("the log was not told")


def test_a_child_that_refuses_its_configuration_ends_the_run_with_its_last_lines(
    supervised: Supervised, tmp_path: Path
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "mine.py").write_text("raise RuntimeError('broken on purpose')")
    process = supervised.start("--plugin-dir", str(plugins))
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "ended with exit code 2" in out
    assert "mine.py: RuntimeError: broken on purpose" in out
    assert not supervised.children()


def test_a_trainer_that_cannot_save_ends_the_run_with_5_and_status_says_why(
    supervised: Supervised, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked, rows = supervised.folder / "blocked", supervised.folder / "rows.jsonl"
    blocked.touch()
    source = {"storage_type": "file", "path": str(rows), "max_read_timeout": 0.5}
    config = json.loads(supervised.config.read_text()) | {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": str(tiny_model_dir), "max_model_len": 64},
        "buffer": {"train_batch_size": 2, "trainer_input": {"experience_buffer": source}},
        "storage": {"uri": str(blocked / "here")},
    }
    supervised.config.write_text(json.dumps(config))
    process = supervised.start()
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 5
    assert "trainer ended with exit code 5" in out and "step 0 is not saved after" in out
    assert main(["status", "-c", str(supervised.config)]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"(?s)not saved +full of step 0 .*Not a\s+directory", out)
    assert re.search(r"trainer +ended .* ended unsaved, see above", out)


def test_an_existing_run_is_not_gone_on_with_unasked(supervised: Supervised) -> None:
    supervised.started()
    run = plan(supervised.config)
    with closing(run.open_log()) as log:
        until(lambda: was_started(log, run.stages[0]), "first record of a child")
    supervised.end()
    config = json.loads(supervised.config.read_text())
    supervised.config.write_text(json.dumps(config | {"continue_from_checkpoint": False}))
    process = supervised.start()
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "holds a run already" in out


# --- giving up


def a_child(tmp_path: Path, *errors: str) -> Child:
    path = tmp_path / "child.log"
    path.write_text("".join(f"{e}\n" for e in errors))
    return Child(ProcessSpec("join", "join-0"), path)


def test_a_child_whose_log_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = a_child(tmp_path)
    assert child.last_error() == "no word of it"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    assert "the disk of its log is full" in child.last_error()
    child.log_path = child.log_path / "below a file"
    with pytest.raises(StreamrftError, match=r"child\.log/below a file: cannot be written: "):
        child.start([], {})


def test_the_same_failure_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrft.deploy.children.time", SimpleNamespace(monotonic=lambda: 0.0))
    child = a_child(tmp_path, "it broke")
    waits = []
    for _ in range(MAX_SAME_FAILURES - 1):
        assert child.restart_later(1)
        waits.append(child.start_at)
    assert not child.restart_later(1)
    assert waits == sorted(waits) and waits[-1] > 1.5 * waits[0]


def test_failures_that_differ_are_given_up_later(tmp_path: Path) -> None:
    child = a_child(tmp_path, "it broke")
    for i in range(MAX_FAILURES - 1):
        assert child.restart_later(i % 2 - 9)
    assert not child.restart_later(1)


def test_progress_forgives(tmp_path: Path) -> None:
    child = a_child(tmp_path, "it broke")
    for _ in range(5 * MAX_SAME_FAILURES):
        assert child.restart_later(1)
        child.failures.clear()


def test_numerical_libraries_get_one_thread_unless_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(CONFIG | {"mode": "both", "trainer": {"num_threads": 3}}))
    stage = plan(path).stage(None)
    threads = {
        spec.command: environment_of(stage, spec)["OMP_NUM_THREADS"] for spec in stage.processes()
    }
    assert threads == {"train": "3", "schedule": "1", "join": "1", "explore": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    spec = ProcessSpec("explore", "explorer-0")
    assert environment_of(stage, spec)["OMP_NUM_THREADS"] == "2"
    assert environment_of(stage, spec)["STREAMRFT_PARENT_PID"] == str(os.getpid())


# --- the goal


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_with_topics(tmp_path, capsys)


def step(number: int, branch: str = "main") -> ev.TrainStep:
    return ev.TrainStep(
        branch=branch, step=number, num_experiences=1, num_tokens=1, metrics={}, epoch=1,
        produced_at=1,
    )  # fmt: skip


def checkpoint(number: int, kind: Any = "full", branch: str = "main") -> ev.Checkpoint:
    return ev.Checkpoint(
        branch=branch, step=number, kind=kind, uri="/c", digest="d" * 64,
        manifest_sha256="e" * 64, epoch=1, produced_at=1,
    )  # fmt: skip


def test_the_goal_is_the_last_step_and_its_full_checkpoint(cli: Cli) -> None:
    with cli.place() as place:

        def missing() -> str:
            return judge(place.log, place.stage).missing

        assert missing() == "step 0 of 1 is the last on the log"
        append(place, "train_steps", cut(place, 1, "rows.0:0:a"), step(1))
        append(place, "checkpoints", checkpoint(0), checkpoint(1, "weights"))
        assert missing() == "step 1 has no full checkpoint on the log"
        append(place, "checkpoints", checkpoint(1))
        assert missing() == ""
        append(place, "train_steps", cut(place, 2, "rows.1:0:a"))
        assert missing() == "the cut of step 2 is not trained"


def test_a_fork_is_not_done_because_its_parent_is(cli: Cli) -> None:
    with cli.place() as place:
        append(place, "train_steps", cut(place, 1, "rows.0:0:a"), step(1))
        append(place, "checkpoints", checkpoint(0), checkpoint(1))
        assert judge(place.log, place.stage).is_reached
    config = json.loads(cli.config.read_text())
    cli.config.write_text(json.dumps(config | {"resume_from": "global_step_0"}))
    with cli.place() as place:
        assert "branch main.0" in judge(place.log, place.stage).missing
        fork = ev.Branch(branch="main.0", parent="main", step=0, produced_at=1)
        append(place, "checkpoints", fork)
        assert judge(place.log, place.stage).missing == "step 0 of 1 is the last on the log"
    config |= {"resume_from": "global_step_1", "branch": "main.0"}
    cli.config.write_text(json.dumps(config))
    with cli.place() as place:
        append(place, "train_steps", step(1, "main.0"))
        append(place, "checkpoints", checkpoint(1, branch="main.0"))
        missing = judge(place.log, place.stage).missing
    assert missing.startswith("branch: 'main.0' began at global_step_0 of main, not at")


def test_without_total_steps_every_group_must_be_trained_or_dead(cli: Cli) -> None:
    config = json.loads(cli.config.read_text())
    config["buffer"]["total_steps"] = None
    cli.config.write_text(json.dumps(config))
    tasks = [
        ev.Task(
            group_id=f"rows.{n}", number=n, taskset="rows", row=n, epoch=0, branch="main", step=1,
            min_policy_version=0, group_size=2, workflow="w", content="{}", produced_at=1,
        )
        for n in range(3)
    ]  # fmt: skip
    with cli.place() as place:
        append(place, "tasks", *tasks)
        append(place, "train_steps", cut(place, 1, "rows.0:0:a"), step(1))
        append(place, "checkpoints", checkpoint(1))
        assert "not all tasks are published" in judge(place.log, place.stage).missing
        append(place, "tasks", ev.Ended(branch="main", num_groups=3, produced_at=1))
        assert judge(place.log, place.stage).missing.startswith("2 of 3 groups")
        append(place, "drops", a_drop("rows.1", 0, "join", group_experiences=0))
        assert judge(place.log, place.stage).missing.startswith("1 of 3 groups")
        append(place, "drops", a_drop("rows.2", 0, "trainer", group_experiences=2))
        assert judge(place.log, place.stage).missing.startswith("1 of 3 groups")
        append(place, "drops", a_drop("rows.2", 1, "trainer", group_experiences=2))
        assert judge(place.log, place.stage).is_reached


def test_dead_groups_of_an_abandoned_step_count_for_the_fork_and_off_lineage_ones_do_not() -> None:
    fork = ev.Branch(branch="main.1", parent="main", step=1, produced_at=1)
    lineage = surviving_lineage([fork])
    filtered = a_drop("rows.7", 0, "join", group_experiences=0)
    off = a_drop("rows.8", 0, "trainer", group_experiences=1, reason="off_lineage")
    assert dead_groups([filtered, off], lineage) == {"rows.7"}


def a_drop(
    group_id: str,
    slot: int,
    where: str,
    *,
    group_experiences: int,
    reason: ev.DropReason | None = None,
) -> ev.Drop:
    return ev.Drop(
        trajectory_id=f"{group_id}:{slot}:a", group_id=group_id, slot=slot, number=0,
        reason=reason or ("stale" if where == "trainer" else "expired"), detail="", where=where,
        branch="main" if where == "trainer" else "", step=1 if where == "trainer" else -1,
        group_experiences=group_experiences, produced_at=1,
    )  # fmt: skip


def test_a_groups_members_may_be_dropped_twice_without_being_two() -> None:
    drop = a_drop("rows.2", 0, "trainer", group_experiences=2)
    assert dead_groups([drop, drop], Lineage.of("main", [])) == set()
