"""The table of rights in docs/kafka.md: with its row and nothing more, every role does its work."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from pathlib import Path

import pytest
from kafka_broker import Broker, needs_kafka_home
from kafka_rights import IN_THE_CLEAR, Right, environment_of, grant, user_settings
from small_run import SmallRun

from streamrft.schemas.errors import AccessDenied
from streamrft.streams.log import Limits, open_log

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
COMMANDS = {"scheduler": "schedule", "explorer": "explore", "join": "join", "trainer": "train"}


def rights() -> dict[str, list[list[str]]]:
    """Role -> names to read, to write, groups and transactional ids, as the page has them."""
    rows = re.findall(r"^\| (\w[\w ]*) \|(.*\|.*\|.*\|.*)\|$", PAGE.split("| role | Read")[1], re.M)
    cells = {role: [cell.split() for cell in line.split("|")] for role, line in rows}
    return {role: [[n for n in cell if n != "-"] for cell in row] for role, row in cells.items()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A broker with a user for each role, and no rights for anyone but the administrator."""
    needs_kafka_home()
    folder = tmp_path_factory.mktemp("rights") / "broker"
    with Broker(folder, user_settings("admin", COMMANDS)) as broker:
        yield broker


def grant_row(broker: Broker, namespace: str, role: str, row: list[list[str]]) -> None:
    """Give the user of a role its row and what the page says comes on top."""
    read, write, groups, ids = row
    wanted = [Right("READ", "TOPIC", name) for name in read]
    wanted += [Right("WRITE", "TOPIC", name) for name in write]
    wanted += [Right("READ", "GROUP", name) for name in groups]
    wanted += [Right("WRITE", "TRANSACTIONAL_ID", name, is_prefix=True) for name in ids]
    wanted += [Right(o, "TOPIC", "", is_prefix=True) for o in ("DESCRIBE", "DESCRIBE_CONFIGS")]
    if role in ("scheduler", "trainer"):
        wanted.append(Right("CREATE", "TOPIC", "roles"))
    grant(broker, "admin", role, [r._replace(name=f"{namespace}.{r.name}") for r in wanted])


def start(run: SmallRun, role: str, *words: str) -> subprocess.Popen[bytes]:
    plugins = ("--plugin-dir", str(run.folder / "plugins"))
    with (run.folder / f"{role}.out").open("wb") as out:
        return subprocess.Popen(
            [*run.command(COMMANDS[role], *words), *plugins],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment_of(role)},
            stdout=out,
            stderr=out,
        )


def ended(processes: dict[str, subprocess.Popen[bytes]]) -> bool:
    return all(processes[role].poll() is not None for role in ("trainer", "scheduler"))


def broken(processes: dict[str, subprocess.Popen[bytes]]) -> bool:
    """A role failed, or one that goes on for ever ended."""
    codes = {role: process.poll() for role, process in processes.items()}
    return any(code or (code == 0 and r in ("join", "explorer")) for r, code in codes.items())


def said(run: SmallRun) -> str:
    return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in run.folder.glob("*.out"))


def test_page_has_a_row_for_every_role():
    assert set(rights()) == {*COMMANDS, "sender of rewards"}


@pytest.mark.parametrize("engine", [pytest.param("native", marks=pytest.mark.slow), "faust"])
def test_every_role_works_with_the_rights_of_its_row(secured, small_run, monkeypatch, engine):
    if engine == "faust":
        pytest.importorskip("faust")
    name = f"small-{secrets.token_hex(4)}"
    run = small_run(
        {"name": name, "event_log": {"url": secured.url, "options": IN_THE_CLEAR}}, steps=2
    )
    for variable, value in environment_of("admin").items():
        monkeypatch.setenv(variable, value)
    done = run.tool("topics", "apply")
    assert done.returncode == 0, done.stderr
    rows = rights()
    for role in COMMANDS:
        grant_row(secured, run.topics.namespace, role, rows[role])
    words = {"join": ("--engine", engine)}
    processes = {role: start(run, role, *words.get(role, ())) for role in COMMANDS}
    try:
        deadline = time.monotonic() + 480
        while not ended(processes):
            assert not broken(processes) and time.monotonic() < deadline, said(run)
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(60)
    status = run.tool("status")
    assert status.returncode == 0, status.stdout + status.stderr


def test_role_without_a_right_of_its_row_is_told_which(secured, monkeypatch):
    for variable, value in environment_of("explorer").items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(AccessDenied, match="nobodys.run.*a right on this"):
        log = open_log(secured.url, Limits(options=IN_THE_CLEAR))
        log.producer().send("nobodys.run.tasks", b"v", partition=0)
