"""Every command and file in the README works, and its claims about set-up are the Makefile's."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from shell import typed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


@dataclass(frozen=True)
class Block:
    """One fenced block; `path` stands in the first line of a file."""

    language: str
    text: str

    @property
    def path(self) -> str | None:
        found = re.match(r"# (\S+/\S+)\n", self.text)
        return found[1] if found else None

    @property
    def is_setup(self) -> bool:
        return self.text.startswith(("make ", "python3 -m venv"))


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[2]) for m in re.finditer(r"```(\w+)\n(.*?)```", text, re.S)]


def recipe(target: str) -> list[str]:
    """Lines of a Makefile rule, its variables and flags as a person would write them."""
    lines = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert lines, f"the Makefile has no target {target}"
    pip = ".venv/bin/python -m pip install --constraint constraints.txt"
    words = {"$(PIP)": pip, "$(BIN)": ".venv/bin", "$(PYTHON)": "python3"}
    text = lines[1]
    for variable, word in words.items():
        text = text.replace(variable, word)
    return [line.strip() for line in text.splitlines() if "touch" not in line]


def test_readme_is_short():
    assert README.count("\n") < 200


def test_commands_of_make_exist():
    named = re.findall(r"make ([a-z0-9]+)", README)
    assert {"quickstart", "test", "gsm8k", "check"} <= set(named)
    for target in named:
        assert recipe(target)


def test_plain_set_up_lines_are_those_of_make():
    (by_hand,) = [b.text for b in blocks(README) if b.text.startswith("python3 -m venv")]
    written = [line for line in by_hand.splitlines() if line]
    made = recipe(".venv/run") + recipe("quickstart") + recipe(".venv/dev") + recipe("test")
    assert written == made


def test_ci_runs_what_the_readme_says():
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            is_here = (page.parent / target).exists()
            assert is_here or target.startswith("https://"), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path):
    """A shell in an empty folder with this Python's programs and a small model."""
    folder = tmp_path_factory.mktemp("readme")

    def shell(commands: str) -> subprocess.CompletedProcess[str]:
        return typed(commands, folder, TRINITY_MODEL_PATH=str(tiny_model_dir))

    shell.folder = folder  # type: ignore[attr-defined]
    return shell


def test_a_newcomer_can_type_the_readme_from_top_to_bottom(newcomer):
    files = [b for b in blocks(README) if b.path]
    assert {Path(b.path or "").suffix for b in files} == {".yaml", ".py"}
    for block in files:
        path = newcomer.folder / (block.path or "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    shell_blocks = [b for b in blocks(README) if b.language == "bash" and not b.is_setup]
    assert len(shell_blocks) >= 4
    for block in shell_blocks:
        done = newcomer(block.text)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"


def test_reward_from_outside_lies_on_the_log_afterwards(newcomer):
    shown = newcomer("streamrft tail rewards --config runs/mine/run.yaml --json")
    assert '"review-17"' in shown.stdout


def test_python_of_the_events_page_writes_a_reward(newcomer):
    from streamrft.schemas import codec, events
    from streamrft.schemas.topics import Topics
    from streamrft.streams.log import Partition, open_log, topic_specs

    url = f"sqlite:///{newcomer.folder}/runs/demo/log.db"
    (newcomer.folder / "runs" / "demo").mkdir(parents=True)
    log, topics = open_log(url), Topics("demo.sort")
    log.ensure_topics(topic_specs(topics))
    (snippet,) = [b for b in blocks((ROOT / "docs/events.md").read_text()) if "producer" in b.text]
    (newcomer.folder / "snippet.py").write_text(snippet.text)
    done = newcomer("python snippet.py")
    assert done.returncode == 0, done.stderr
    consumer = log.consumer()
    consumer.assign({Partition(topics.name("rewards"), p): 0 for p in range(4)})
    (record,) = consumer.poll(timeout_ms=2000)
    assert codec.decode(record.value, events.Reward).event_id == "review-17"
    log.close()


def test_every_honoured_key_is_documented():
    from streamrft.deploy.config.read import known_paths
    from streamrft.deploy.config.schema import Config
    from streamrft.deploy.config.support import RULES

    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = set(re.findall(r"`([a-z_0-9.]+)`", text))
    ruled = {rule.path for rule in RULES}
    elsewhere = ("eval_tasksets", "tasksets.", "taskset.", "auxiliary", "rollout_model.", "format.")
    paths = list(known_paths(Config))
    sections = {p.rpartition(".")[0] for p in paths}
    for path in set(paths) - sections:
        ancestors = {path.rsplit(".", i)[0] for i in range(path.count(".") + 1)}
        if ancestors & ruled or any(part in path for part in elsewhere):
            continue
        assert path.rpartition(".")[2] in documented or path in documented, path
