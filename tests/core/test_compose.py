"""docker-compose.yml as far as it can be judged without a container engine.

tests/data/compose-spec.json is compose's own schema, from github.com/compose-spec/compose-spec
(Apache-2.0) as check-jsonschema 0.39.0 carries it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from streamrft.deploy.cli import _parser
from streamrft.deploy.config.load import load
from streamrft.deploy.images import bucket, healthy
from streamrft.deploy.kafka.broker import SINGLE
from streamrft.deploy.kafka.serve import LOCAL, PORT

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "images" / "Dockerfile").read_text()
ENV_EXAMPLE = (ROOT / ".env.example").read_text()
ONE_SHOT = {"prepare", "topics", "warmup"}
OURS = {n: s for n, s in SERVICES.items() if s["image"].startswith("streamrft:")}
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?\Z")
SECRET = re.compile(r"(?i)password|secret|_key|token|credential")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?:(:?[-?])([^}]*))?\}")


def lines_of(command: Any) -> list[list[str]]:
    """The command lines that a service or a check runs, shell scripts taken apart."""
    words = [str(word) for word in command]
    if words[:1] == ["CMD"]:
        words = words[1:]
    if words[:1] == ["sh"]:
        return [shlex.split(line) for line in words[-1].splitlines() if line.strip()]
    return [words]


def command_lines() -> list[list[str]]:
    found = [line for service in OURS.values() for line in lines_of(service["command"])]
    checks = [s["healthcheck"].get("test") for s in OURS.values()]
    return found + [line for check in checks if check for line in lines_of(check)]


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def test_file_follows_the_schema_of_compose():
    schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
    wrong = jsonschema.Draft202012Validator(schema).iter_errors(COMPOSE)
    assert [error.message for error in wrong] == []


def test_schema_refuses_a_word_that_compose_does_not_know():
    schema = json.loads((ROOT / "tests" / "data" / "compose-spec.json").read_text())
    wrong = {"services": {"kafka": {"image": "x", "healthchek": {}}}}
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - set(OURS)))
def test_images_of_others_are_pinned(name):
    assert PINNED.match(SERVICES[name]["image"])


def test_base_image_is_pinned_and_nothing_runs_as_root():
    (base,) = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    assert PINNED.match(base)
    users = re.findall(r"^USER (\S+)", DOCKERFILE, re.M)
    assert users and users[-1] not in ("root", "0")


def test_what_the_image_copies_is_there_and_not_ignored():
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.M)
    for words in re.findall(r"^COPY (.+)", DOCKERFILE, re.M):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists() and source in allowed, source


def test_image_takes_extras_that_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for text in (DOCKERFILE, TEXT, ENV_EXAMPLE):
        (found,) = re.findall(r"EXTRAS[=:-]+ *(?:\$\{\w+:-)?([a-z0-9,]+)", text)
        assert set(found.split(",")) <= set(extras)


def test_no_secret_has_a_value():
    settings = [
        (f"{name}.{key}", str(value))
        for name, service in SERVICES.items()
        for key, value in (service.get("environment") or {}).items()
        if SECRET.search(key)
    ]
    assert settings
    for where, value in settings:
        assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), f"{where} is {value}"
    for line in ENV_EXAMPLE.splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#") and SECRET.search(name):
            assert value == "", line


def test_every_variable_is_in_the_example_with_the_same_default_and_explained():
    used = {m[1]: m for m in VARIABLE.finditer(re.sub(r"(?m)^ *#.*", "", TEXT))}
    given = dict(re.findall(r"^(\w+)=(.*)$", ENV_EXAMPLE, re.M))
    assert set(used) == set(given)
    for name, match in used.items():
        assert match[2] in (":-", ":?"), f"{name}: neither a default nor required"
        if match[2] == ":-":
            assert given[name] == match[3], name
        else:
            assert given[name] == "" and len(match[3]) > 20, name
    blocks = ENV_EXAMPLE.split("\n\n")
    assert all(block.startswith("#") for block in blocks)


def test_env_file_is_never_committed():
    assert "\n.env\n" in (ROOT / ".gitignore").read_text()


def test_ports_are_published_on_loopback_only():
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published and all(str(port).startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_long_lived_services_have_a_check_and_all_have_an_end(name):
    service = SERVICES[name]
    check = service["healthcheck"]
    if name in ONE_SHOT:
        assert check == {"disable": True} and service["restart"] == "on-failure"
    else:
        assert check["test"][0] == "CMD"
        assert {"interval", "timeout", "retries", "start_period"} <= set(check)
    assert "stop_grace_period" in service
    assert service["deploy"]["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_services_wait_for_what_they_need(name):
    for other, how in SERVICES[name].get("depends_on", {}).items():
        done = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
        assert how["condition"] == done


def test_services_that_end_are_not_started_again():
    for name in ("trainer", "scheduler"):
        assert SERVICES[name]["restart"] == "on-failure"


def test_volumes_are_named():
    mounted = [v.split(":") for s in SERVICES.values() for v in s.get("volumes", ())]
    assert {source for source, *_ in mounted} == set(COMPOSE["volumes"])


def test_replicas_have_no_name_of_their_own_and_others_have():
    for name, service in OURS.items():
        for words in lines_of(service["command"]):
            if words[:2] in (["streamrft", "join"], ["streamrft", "explore"]):
                assert "--name" not in words, name
            elif words[:2] in (["streamrft", "train"], ["streamrft", "schedule"]):
                assert "--name" in words, name


@pytest.mark.parametrize("words", command_lines(), ids=lambda words: " ".join(words)[:60])
def test_command_lines_are_understood(words):
    if words[0] == "streamrft":
        parser, _ = _parser()
        assert parser.parse_args(words[1:]).handler
    elif words[:2] == ["python", "-m"]:
        module = words[2].removeprefix("streamrft.deploy.images.")
        assert module in {"bucket", "healthy"} and bucket.main and healthy.main
    else:
        assert words[0] == "python" and (ROOT / words[1]).is_file()
    config = option(words, "--config")
    if config:
        stages = {stage.name for stage in load(ROOT / config).stages}
        assert option(words, "--stage") in stages
    folder = option(words, "--plugin-dir")
    assert folder is None or (ROOT / folder).is_dir()


def test_broker_has_the_settings_of_make_kafka():
    environment = SERVICES["kafka"]["environment"]
    for name, value in {**SINGLE, **LOCAL}.items():
        variable = f"KAFKA_{name.upper().replace('.', '_')}"
        assert str(environment[variable]) == value, variable
    assert f"${{KAFKA_PORT:-{PORT}}}" in environment["KAFKA_ADVERTISED_LISTENERS"]


def test_run_uses_the_services_of_the_file(monkeypatch):
    environment = OURS["trainer"]["environment"]
    for name in ("QUICKSTART_LOG", "QUICKSTART_STORAGE", "QUICKSTART_ROOT"):
        monkeypatch.setenv(name, VARIABLE.sub(lambda m: m[3], environment[name]))
    config = load(ROOT / "examples" / "quickstart" / "quickstart.yaml").stages[-1].config
    listener = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")[0]
    assert config.event_log.url == listener.replace("PLAINTEXT", "kafka")
    assert config.storage.uri == "s3://streamrft"
    assert environment["AWS_ENDPOINT_URL"] == "http://s3:8333"
    assert config.checkpoint_root_dir == "/runs"


def test_roles_that_touch_the_store_have_its_keys_and_no_other_has():
    with_keys = {n for n, s in OURS.items() if "AWS_SECRET_ACCESS_KEY" in s["environment"]}
    assert with_keys == {"prepare", "warmup", "trainer", "join", "explorer"}
