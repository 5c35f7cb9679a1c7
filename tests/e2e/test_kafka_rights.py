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
from small_run import SmallRun

from streamrft.schemas.errors import AccessDenied
from streamrft.streams.log import Limits, open_log

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
COMMANDS = {"scheduler": "schedule", "explorer": "explore", "join": "join", "trainer": "train"}
USERS = ("broker", "admin", *COMMANDS)
OPTIONS = {"security.protocol": "SASL_PLAINTEXT"}
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


def rights() -> dict[str, list[list[str]]]:
    """Role -> names to read, to write, groups and transactional ids, as the page has them."""
    rows = re.findall(r"^\| (\w[\w ]*) \|(.*\|.*\|.*\|.*)\|$", PAGE.split("| role | Read")[1], re.M)
    cells = {role: [cell.split() for cell in line.split("|")] for role, line in rows}
    return {role: [[n for n in cell if n != "-"] for cell in row] for role, row in cells.items()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A broker with a user for each role, and no rights for anyone but the administrator."""
    needs_kafka_home()
    known = "".join(f' user_{name}="{name}-secret"' for name in USERS)
    jaas = f'{MODULE} required username="broker" password="broker-secret"{known};'
    broker = Broker(
        tmp_path_factory.mktemp("rights") / "broker",
        {
            "inter.broker.listener.name": "SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": jaas,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:broker;User:admin",
        },
    ).start()
    yield broker
    broker.stop()


def grant(broker: Broker, namespace: str, role: str, row: list[list[str]]) -> None:
    """Give the user of a role its row and what the page says comes on top."""
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    def may(operation, kind, name, pattern=ResourcePatternType.LITERAL):
        allow = AclPermissionType.ALLOW
        return AclBinding(
            kind, f"{namespace}.{name}", pattern, f"User:{role}", "*", operation, allow
        )

    by_prefix = ResourcePatternType.PREFIXED
    read, write, groups, ids = row
    wanted = [may(AclOperation.READ, ResourceType.TOPIC, name) for name in read]
    wanted += [may(AclOperation.WRITE, ResourceType.TOPIC, name) for name in write]
    wanted += [may(AclOperation.READ, ResourceType.GROUP, name) for name in groups]
    wanted += [may(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, n, by_prefix) for n in ids]
    wanted += [
        may(operation, ResourceType.TOPIC, "", by_prefix)
        for operation in (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
    ]
    if role in ("scheduler", "trainer"):
        wanted.append(may(AclOperation.CREATE, ResourceType.TOPIC, "roles"))
    admin = AdminClient({"bootstrap.servers": broker.address, **of("admin"), **OPTIONS})
    for future in admin.create_acls(wanted).values():
        future.result(10)


def of(user: str) -> dict[str, str]:
    return {
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": f"{user}-secret",
    }


def as_user(user: str) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "STREAMRFT_KAFKA_USERNAME": user,
        "STREAMRFT_KAFKA_PASSWORD": f"{user}-secret",
    }


def start(run: SmallRun, role: str, *words: str) -> subprocess.Popen[bytes]:
    plugins = ("--plugin-dir", str(run.folder / "plugins"))
    with (run.folder / f"{role}.out").open("wb") as out:
        return subprocess.Popen(
            [*run.command(COMMANDS[role], *words), *plugins],
            env={**os.environ, **as_user(role)},
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
    run = small_run({"name": name, "event_log": {"url": secured.url, "options": OPTIONS}}, steps=2)
    for variable, value in as_user("admin").items():
        monkeypatch.setenv(variable, value)
    done = run.tool("topics", "apply")
    assert done.returncode == 0, done.stderr
    rows = rights()
    for role in COMMANDS:
        grant(secured, run.topics.namespace, role, rows[role])
    words = {"join": ("--engine", engine)}
    processes = {role: start(run, role, *words.get(role, ())) for role in COMMANDS}
    try:
        deadline = time.monotonic() + 100
        while not ended(processes):
            assert not broken(processes) and time.monotonic() < deadline, said(run)
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(20)
    status = run.tool("status")
    assert status.returncode == 0, status.stdout + status.stderr


def test_role_without_a_right_of_its_row_is_told_which(secured, monkeypatch):
    for variable, value in as_user("explorer").items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(AccessDenied, match="nobodys.run.*a right on this"):
        log = open_log(secured.url, Limits(options=OPTIONS))
        log.producer().send("nobodys.run.tasks", b"v", partition=0)
