"""A run over epochs whose every rollout failed has trained nothing, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import append, cli_with_topics

from streamrft.deploy.goal import judge
from streamrft.deploy.plan import plan
from streamrft.deploy.supervisor import supervise
from streamrft.schemas import events as ev


class Lines:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, log: object, stage: object) -> None: ...

    def refresh(self, children: object) -> None: ...

    def end(self) -> None: ...


def a_drop(slot: int, reason: ev.DropReason) -> ev.Drop:
    return ev.Drop(
        trajectory_id=f"rows.0:{slot}:a", group_id="rows.0", slot=slot, number=0, reason=reason,
        detail="the reward function raised KeyError: 'x'", where="join", group_experiences=0,
        produced_at=1,
    )  # fmt: skip


@pytest.mark.parametrize(("second", "code"), [("failed", 1), ("expired", 0)])
def test_a_goal_that_was_reached_by_failures_alone_is_a_failure(
    second: ev.DropReason,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cli, folder, lines = cli_with_topics(tmp_path, capsys), tmp_path / "global_step_0", Lines()
    config = json.loads(cli.config.read_text())
    config["buffer"]["total_steps"] = None
    cli.config.write_text(json.dumps(config))
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    start = ev.Checkpoint(
        branch="main", step=0, kind="full", uri=str(folder), digest="d" * 64,
        manifest_sha256="e" * 64, epoch=1, produced_at=1,
    )  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("{}")
    with cli.place() as place:
        append(place, "checkpoints", start)
        append(place, "tasks", ev.Ended(branch="main", num_groups=1, produced_at=1))
        append(place, "drops", a_drop(0, "failed"), a_drop(1, second))
        assert judge(place.log, place.stage).is_reached
    monkeypatch.setattr("streamrft.deploy.supervisor._Supervisor._catch_signals", lambda self: None)
    assert supervise(plan(cli.config), lines) == code
    found = "trained nothing: all 2 rollouts failed, the last because the reward function raised"
    assert (found in lines.said[0]) == (code == 1), lines.said
