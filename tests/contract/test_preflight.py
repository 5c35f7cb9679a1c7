"""What a run names is looked for before anything starts; a name that is there is never refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cli_run import CONFIG, Cli, new_cli

from streamrft.consumers.algorithms import build
from streamrft.deploy.plan import plan
from streamrft.deploy.plugins import load_plugins
from streamrft.deploy.preflight import check_functions
from streamrft.deploy.written import PLACES, entries_of
from streamrft.producers.rewards import REWARDS
from streamrft.producers.workflows import WORKFLOWS
from streamrft.schemas.errors import ConfigError
from streamrft.streams.filters import FILTERS
from streamrft.streams.priority import PRIORITIES

PLUGIN = """\
from streamrft.producers.rewards import REWARDS
from streamrft.producers import workflows

@REWARDS.register("digits")
class Digits:
    def __init__(self, scale=1.0): ...
    def __call__(self, rollout): return {"digits": 1.0}

@workflows.WORKFLOWS.register("mine")
class Mine(workflows.SimpleWorkflow): ...

for name in ("one", "two"):
    REWARDS.register(f"made_{name}")(Digits)
"""

JUDGE = """\
import os
from streamrft.producers.rewards import REWARDS

class Judge:
    def __init__(self):
        if "JUDGE" not in os.environ:
            raise ValueError("no judge")
    def __call__(self, rollout): return {"judge": 1.0}

REWARDS.register("ju" + "dge")(Judge)
"""


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    cli = new_cli(tmp_path, capsys)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN)
    return cli


def with_taskset(cli: Cli, **fields: Any) -> None:
    taskset = {"name": "rows", "path": "rows.jsonl"} | fields
    cli.change(buffer={"total_steps": 1, "explorer_input": {"taskset": taskset}})


def test_the_sources_tell_every_name_that_the_registries_have() -> None:
    own = {"WORKFLOWS": WORKFLOWS, "REWARDS": REWARDS, "FILTERS": FILTERS, "PRIORITIES": PRIORITIES}
    for family in PLACES:
        registry = own.get(family) or getattr(build, family)
        entries = entries_of(family, ())
        assert entries.keys() <= set(registry.names())
        # other tests may have registered more
        ours = {n for n in registry.names() if "streamrft" in registry.get(n).__module__}
        assert entries.keys() >= ours, family


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"default_reward_fn_type": "digit"},
            "'digit' is unknown. Did you mean 'digits'? Known: a",
        ),
        ({"default_workflow_type": "min"}, "workflow 'min' is unknown. Did you mean 'mine'? Known"),
        (
            {"default_reward_fn_type": "digits", "reward_fn_args": {"scal": 2}},
            "argument of reward_fn 'digits' 'scal' is unknown. Did you mean 'scale'?",
        ),
    ],
    ids=["reward", "workflow", "argument"],
)
def test_a_wrong_name_ends_a_run_before_it_starts(
    changes: dict[str, Any], says: str, cli: Cli
) -> None:
    with_taskset(cli, **changes)
    code, _, err = cli.run("run", "--plugin-dir", str(cli.config.parent / "plugins"))
    assert code == 2 and err.startswith("streamrft run: taskset 'rows': ") and says in err
    assert not (cli.config.parent / "runs").exists()


def test_filters_and_losses_are_looked_for_too_by_the_roles_own_commands(cli: Cli) -> None:
    cli.change(streams={"filters": [{"name": "reward_filer"}]})
    code, _, err = cli.run("join")
    assert code == 2 and "filter 'reward_filer' is unknown. Did you mean 'reward_filter'?" in err
    cli.change(algorithm=CONFIG["algorithm"] | {"policy_loss_fn_args": {"clip_rang": 0.2}})
    code, _, err = cli.run("train")
    assert code == 2 and "'clip_rang' is unknown. Did you mean 'clip_range'?" in err
    assert not (cli.config.parent / "runs").exists()


def test_a_scheduler_needs_no_function_of_the_explorers(cli: Cli) -> None:
    with_taskset(cli, default_reward_fn_type="elsewhere")
    code, _, err = cli.run("schedule")  # it goes on to the rows
    assert code == 2 and "rows.jsonl does not exist" in err and "elsewhere" not in err


def test_a_function_is_asked_for_with_the_variables_that_its_explorer_sets(cli: Cli) -> None:
    (cli.config.parent / "plugins" / "judge.py").write_text(JUDGE)
    with_taskset(cli, default_reward_fn_type="judge")
    run = plan(cli.config, (str(cli.config.parent / "plugins"),))
    with pytest.raises(ConfigError, match="reward_fn 'judge': no judge"):
        check_functions(run, [(run.stages[0], "explore")])
    cli.change(explorer={"env_vars": {"JUDGE": "http://127.0.0.1:1"}})
    run = plan(cli.config, run.plugin_dirs)
    check_functions(run, [(run.stages[0], "explore")])


def test_a_dotted_path_into_a_module_that_raises_is_refused_with_what_it_raised(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cli.config.parent / "unparsable.py").write_text("def f(:\n")
    monkeypatch.setenv("PYTHONPATH", str(cli.config.parent), prepend=os.pathsep)
    with_taskset(cli, default_reward_fn_type="unparsable.f")
    code, _, err = cli.run("run")
    assert code == 2 and "'unparsable.f' cannot be imported: SyntaxError: invalid syntax" in err


def test_no_process_is_asked_about_what_the_sources_settle(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    real = subprocess.run

    def run_counted(words: list[str], **options: Any) -> Any:
        asked.append(words)
        return real(words, **options)

    monkeypatch.setattr("streamrft.deploy.preflight.subprocess.run", run_counted)
    plugins = (str(cli.config.parent / "plugins"),)
    cli.change(streams={"filters": [{"name": "length_filter", "args": {"max_tokens": 3}}]})
    for num_asked, reward in enumerate(("digits", "made_two", "json.dumps")):
        with_taskset(cli, default_workflow_type="mine", default_reward_fn_type=reward)
        run = plan(cli.config, plugins)
        check_functions(run, [(run.stages[0], c) for c in run.stages[0].commands])
        assert len(asked) == num_asked, (reward, asked)


def test_a_plugin_that_is_no_python_or_missing_is_named_with_its_line(cli: Cli) -> None:
    folder = cli.config.parent / "plugins"
    (folder / "bad.py").write_text("x = 1\ndef broken(:\n")
    run = plan(cli.config, (str(folder),))
    with pytest.raises(ConfigError, match=r"bad\.py:2: invalid syntax: def broken\(:"):
        check_functions(run, [(run.stages[0], "explore")])
    (folder / "bad.py").unlink()
    (folder / "bad.py").mkdir()
    with pytest.raises(ConfigError, match=r"bad\.py cannot be read: Is a directory$"):
        check_functions(run, [(run.stages[0], "explore")])
    run = plan(cli.config, (str(folder / "away"),))
    with pytest.raises(ConfigError, match="away is no folder"):
        check_functions(run, [(run.stages[0], "explore")])


def test_a_plugin_that_prints_or_ends_the_process_is_no_answer(cli: Cli) -> None:
    folder = cli.config.parent / "plugins"
    (folder / "bye.py").write_text("import atexit\natexit.register(print, 'bye')\n")
    with_taskset(cli, default_reward_fn_type="digit")
    run = plan(cli.config, (str(folder),))
    with pytest.raises(ConfigError, match="'digit' is unknown"):
        check_functions(run, [(run.stages[0], "explore")])
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"script\.py: SystemExit: 0"):
        check_functions(run, [(run.stages[0], "explore")])


def test_the_lock_that_an_editor_keeps_beside_a_plugin_is_not_one(cli: Cli) -> None:
    folder = cli.config.parent / "plugins"
    (folder / ".#mine.py").symlink_to("somebody@host.1:1")
    with_taskset(cli, default_reward_fn_type="digits")
    run = plan(cli.config, (str(folder),))
    check_functions(run, [(run.stages[0], "explore")])
    load_plugins(run.plugin_dirs)
    assert "digits" in REWARDS.names()


def test_plugins_of_one_name_in_two_folders_are_both_imported(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text(
            f"import pathlib\npathlib.Path({str(folder / 'seen')!r}).touch()"
        )
    load_plugins(tuple(map(str, folders)))
    assert all((folder / "seen").exists() for folder in folders)
    with pytest.raises(ConfigError, match="is no folder"):
        load_plugins((str(tmp_path / "c"),))


def test_rows_and_models_that_are_not_there_end_a_run_before_it_starts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.csv"
    with_taskset(cli, path=str(rows))
    code, _, err = cli.run("run")
    assert code == 2 and f"taskset 'rows': {rows} does not exist" in err
    rows.write_text("a,b\n")
    code, _, err = cli.run("run")
    assert code == 2 and f"{rows} is not read; .jsonl" in err and f"> {tmp_path}/rows.jsonl" in err
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}))
    with_taskset(cli, path=str(tmp_path / "rows.jsonl"))
    with monkeypatch.context() as patched:  # root may read everything
        patched.setattr("os.access", lambda path, mode: False)
        assert "rows.jsonl cannot be read here: its rights" in cli.run("run")[2]
        patched.setattr("streamrft.deploy.preflight.find_spec", lambda name: None)
        code, _, err = cli.run("run")
        assert code == 1 and "torch, which streamrft train needs, is not installed. Run: pip" in err
    cli.change(model={"model_path": "./away", "max_model_len": 64})
    for command in ("run", "train"):
        code, _, err = cli.run(command)
        assert code == 2
        assert err.startswith(f"streamrft {command}: model.model_path: ./away is no folder here")
