"""What a person is told while a run goes on, in lines."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from cli_run import Cli, append, cli_with_topics, new_cli
from waiting import until

from streamrft.deploy.plan import plan
from streamrft.deploy.views.display import PlainScreen
from streamrft.schemas import events as ev

DROP = ev.Drop(
    trajectory_id="rows.0:0:a", group_id="rows.0", slot=0, number=0, reason="failed", detail="",
    where="join", group_experiences=0, produced_at=1,
)  # fmt: skip


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_with_topics(tmp_path, capsys)


def beat(name: str, waiting_for: str = "") -> ev.Heartbeat:
    return ev.Heartbeat(
        process=name,
        role=name,
        state="idle" if waiting_for else "alive",
        waiting_for=waiting_for,
        host="here",
        pid=1,
        produced_at=ev.now_ms(),
    )


def test_a_run_without_steps_says_now_and_then_what_it_waits_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, out = [ev.now_ms()], io.StringIO()
    monkeypatch.setattr(ev, "now_ms", lambda: now_ms[0])
    screen = PlainScreen(out)
    with cli.place() as place:
        append(place, "heartbeats", beat("trainer", "experiences"), beat("join"))
        append(place, "drops", DROP)
        screen.begin(place.log, place.stage)
        for _ in range(30):
            now_ms[0] += 10_000
            screen.refresh([])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("no step")]
    assert lines == [
        f"no step for {s} s  trainer waits for experiences  dropped 1 failed"
        for s in (60, 120, 240)
    ]


def step(number: int) -> ev.TrainStep:
    return ev.TrainStep(
        branch="main", step=number, num_experiences=2, num_tokens=6, metrics={}, epoch=1,
        produced_at=ev.now_ms(),
    )  # fmt: skip


def test_a_continued_run_tells_no_old_step_again(tmp_path, capsys, place):
    cli, out = new_cli(tmp_path, capsys), io.StringIO()
    cli.change(name=place.prefix, event_log={"url": place.url})
    run = plan(cli.config)
    log = run.open_log()
    log.ensure_topics(run.topic_specs(run.stage(None)))
    log.close()
    screen = PlainScreen(out)
    with cli.place() as at:
        append(at, "train_steps", step(1), step(2))
        screen.begin(at.log, at.stage)
        append(at, "train_steps", step(3))
        until(lambda: screen.refresh([]) or "step 3" in out.getvalue(), "line of step 3")
    begin, *steps = out.getvalue().splitlines()
    assert "going on after step 2;" in begin
    cli.change(name=place.prefix, event_log={"url": place.url}, resume_from="global_step_1")
    with cli.place() as at:
        screen.begin(at.log, at.stage)
    assert ", branch main.1 from global_step_1;" in out.getvalue().splitlines()[-1]
    (seconds,) = [re.search(r"^step 3.*  (\S+) s$", line) for line in steps]
    assert seconds and 0 <= float(seconds[1]) < 30
