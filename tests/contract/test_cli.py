"""The command line over a real embedded log: lines in, lines out, a ledger that finds a hole."""

from __future__ import annotations

import json
import resource
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_run import CONFIG, Cli, append, cli_with_topics, failed, new_cli, trajectory
from waiting import until

from streamrft.deploy.cli import main
from streamrft.deploy.plan import plan
from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.topics import partition_for

REWARD = {"event_id": "r1", "trajectory_id": "rows.0:0:a", "source": "human", "value": 0.5}


@pytest.fixture
def unstarted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return new_cli(tmp_path, capsys)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_with_topics(tmp_path, capsys)


# --- starting


def test_help_is_there_at_once_and_imports_little() -> None:
    script = (
        "import sys; from streamrft.deploy.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'rich', 'omegaconf'} & set(sys.modules)))"
    )
    assert any(_cpu_s([sys.executable, "-c", script]) < 0.5 for _ in range(5))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert max(map(len, done.stdout.splitlines())) < 80
    assert "usage: streamrft" in done.stdout


def _cpu_s(command: list[str]) -> float:
    """What it takes on a machine that does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("streamrft 0.")
    assert main([]) == 2
    assert main(["rnu", "-c", "run.yaml"]) == 2
    assert "Did you mean 'run'? Known: convert, dead-letters" in capsys.readouterr().err
    for words, missing in (["run"], "-c/--config"), (["dead-letters"], "list|show|replay"):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert f"arguments are required: {missing}" in capsys.readouterr().err


def test_a_configuration_error_is_one_line_and_exit_2(unstarted: Cli) -> None:
    unstarted.config.write_text("buffer: {batch_sise: 3}")
    code, out, err = unstarted.run("run", "--dry-run")
    assert (code, out) == (2, "")
    assert err == (
        "streamrft run: buffer.batch_sise: unknown key. Did you mean buffer.batch_size?\n"
    )


def test_a_full_disk_below_the_output_does_not_change_the_exit_code(unstarted: Cli) -> None:
    unstarted.config.write_text("buffer: {batch_sise: 3}")
    command = [sys.executable, "-m", "streamrft.deploy.cli", "train", "-c", str(unstarted.config)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full).returncode == 2


def test_debug_shows_where_an_error_came_from(unstarted: Cli) -> None:
    unstarted.config.write_text("buffer: {batch_sise: 3}")
    with pytest.raises(ValueError, match="batch_sise"):
        unstarted.run("status", "--debug")


@pytest.mark.parametrize("words", [("status",), ("tail", "rewards"), ("explain", "rows.0")])
def test_a_run_that_never_started_has_no_log_and_gets_none(
    words: tuple[str, ...], unstarted: Cli, tmp_path: Path
) -> None:
    code, _, err = unstarted.run(*words)
    assert code == 1
    assert "no log there yet. Start the run first: streamrft run --config" in err
    assert not (tmp_path / "runs").exists()
    unstarted.change(event_log=f"sqlite:///{tmp_path}/{'long' * 99}/log.db")
    code, _, err = unstarted.run(*words)
    assert code == 1 and err.endswith("log.db: cannot be looked at: File name too long\n")


def test_a_dry_run_shows_values_facts_and_warnings_and_starts_nothing(
    unstarted: Cli, tmp_path: Path
) -> None:
    unstarted.config.write_text(unstarted.config.read_text()[:-1] + ', "monitor": {}}')
    code, out, err = unstarted.run("run", "--dry-run")
    assert code == 0
    for shown in ("experiences_a_step: 2", "p.n.rewards: 4", "deadline: 259200000"):
        assert shown in out
    assert err.startswith("warning: monitor:")
    assert not (tmp_path / "runs").exists()


def test_a_job_folder_that_cannot_be_made_is_named(unstarted: Cli) -> None:
    place = unstarted.config.parent / "no_folder"
    place.write_text("")
    unstarted.config.write_text(json.dumps(CONFIG | {"checkpoint_root_dir": str(place)}))
    code, _, err = unstarted.run("run")
    assert code == 2
    assert err == (
        f"streamrft run: {place}/p/n: cannot be made (Not a directory). Set checkpoint_root_dir or "
        "event_log to a place that can be written.\n"
    )


# --- tail and produce


def test_a_produced_line_lies_where_its_key_belongs(cli: Cli) -> None:
    code, _, err = produce(cli, "rewards", json.dumps(REWARD))
    assert (code, err) == (0, "1 events produced to p.n.rewards\n")
    (line,) = cli.lines("tail", "rewards", "--json")
    assert line["key"] == "rows.0"
    assert line["partition"] == partition_for(b"rows.0", 4)
    assert line["type"] == "Reward"
    assert line["event"] | REWARD == line["event"]


def test_bad_lines_are_named_and_the_rest_goes_on(cli: Cli) -> None:
    lines = [
        json.dumps(REWARD),
        "no json",
        "",
        json.dumps(REWARD | {"event_id": "r2", "vale": 1}),
        json.dumps(REWARD | {"event_id": "r3", "value": float("nan")}),
        json.dumps([1]),
        "[" * 100_000,
        json.dumps(REWARD | {"event_id": "r4"}),
    ]
    code, _, err = produce(cli, "rewards", "\n".join(lines))
    assert code == 1
    for number, what in (
        (2, "no JSON"),
        (4, "'vale'"),
        (5, "not a finite"),
        (6, "list found"),
        (7, "no JSON"),
    ):
        assert any(f"line {number}:" in e and what in e for e in err.splitlines()), (number, err)
    assert "2 events produced to p.n.rewards, 5 lines refused" in err
    assert [e["event"]["event_id"] for e in cli.lines("tail", "rewards", "--json")] == ["r1", "r4"]
    code, _, err = cli.run("produce", "rewards", "--file", str(cli.config.parent))
    assert (code, err) == (1, f"streamrft produce: --file {cli.config.parent}: Is a directory\n")


def test_what_tail_prints_can_be_produced_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with cli.place() as place:
        append(place, "trajectories", trajectory(0, 0), failed(0, 1))
        append(place, "tasks", ev.Ended(branch="main", num_groups=3, produced_at=5))
    for topic in ("trajectories", "tasks"):
        code, text, _ = cli.run("tail", topic, "--json")
        assert code == 0
        code, _, err = produce(cli, topic, text)
        assert code == 0, err
        events = [line["event"] for line in cli.lines("tail", topic, "--json")]
        half = len(events) // 2
        assert events[:half] == events[half:]


def produce(cli: Cli, topic: str, text: str) -> tuple[int, str, str]:
    path = cli.config.parent / "lines.jsonl"
    path.write_text(text)
    return cli.run("produce", topic, "--file", str(path))


def test_the_last_records_are_told_where_markers_of_transactions_follow(unstarted, kafka_url):
    unstarted.change(name=f"tail-{secrets.token_hex(4)}", event_log={"url": kafka_url})
    run = plan(unstarted.config)
    stage, log = run.stage(None), run.open_log()
    log.ensure_topics(run.topic_specs(stage))
    producer = log.producer()
    for number in range(5):
        reward = ev.Reward(**{**REWARD, "event_id": f"r{number}"})
        with producer.transaction():
            producer.send(stage.topics.name("rewards"), codec.encode(reward), key=b"rows.0")
    log.close()
    for num in (1, 3, 100):
        lines = unstarted.lines("tail", "rewards", "--json", "-n", str(num))
        assert [line["event"]["event_id"] for line in lines] == [f"r{i}" for i in range(5)][-num:]


def test_produce_reads_standard_input_as_it_comes(cli: Cli) -> None:
    command = [sys.executable, "-m", "streamrft.deploy.cli", "produce", "rewards"]
    process = subprocess.Popen(
        [*command, "--config", str(cli.config)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin
    process.stdin.write(json.dumps(REWARD).encode() + b"\n")
    process.stdin.flush()
    until(lambda: cli.lines("tail", "rewards", "--json") != [], "the first line")
    _, err = process.communicate(json.dumps(REWARD | {"event_id": "r2"}).encode(), timeout=90)
    assert process.returncode == 0, err
    assert len(cli.lines("tail", "rewards", "--json")) == 2


def test_a_long_line_costs_what_it_is_long(cli: Cli) -> None:
    long = json.dumps(REWARD | {"event_id": "x" * 30_000_000, "vale": 1})
    began = time.process_time()
    code, _, err = produce(cli, "rewards", f"{long}\n{json.dumps(REWARD)}")
    assert time.process_time() - began < 5, "the line was copied once for each part of it"
    assert (code, err.splitlines()[-1]) == (1, "1 events produced to p.n.rewards, 1 lines refused")


@pytest.mark.parametrize("option", ["-n", "--from"])
def test_a_negative_number_of_events_is_refused(option: str, cli: Cli) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run("tail", "rewards", option, "-3")
    assert ended.value.code == 2
    assert "'-3' found; a whole number from 0" in cli.capsys.readouterr().err


def test_tail_shows_the_last_events_or_those_from_an_offset(cli: Cli) -> None:
    with cli.place() as place:
        append(place, "trajectories", *(trajectory(g, 0) for g in range(30)))
    shown = cli.lines("tail", "trajectories", "--json")
    assert len(shown) == 10
    assert len(cli.lines("tail", "trajectories", "--json", "-n", "3")) == 3
    later = cli.lines("tail", "trajectories", "--json", "--from", "5")
    assert {line["offset"] >= 5 for line in later} == {True}
    assert len(later) == sum(
        max(0, sum(partition_for(f"rows.{g}".encode(), 4) == p for g in range(30)) - 5)
        for p in range(4)
    )
    assert cli.lines("tail", "trajectories", "--json", "--from", "99") == []


def test_tail_for_people_is_one_line_an_event_poison_included(cli: Cli) -> None:
    with cli.place() as place:
        append(place, "trajectories", trajectory(0, 1), failed(0, 0))
        producer = place.log.producer()
        producer.send(place.stage.topics.name("trajectories"), b"\x00poison", key=b"rows.1")
        producer.flush()
    code, out, _ = cli.run("tail", "trajectories")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "rows.0:1:a  stop  policy 0  3 tokens  rule 1" in out
    assert "rows.0:0:a  failed: it broke" in out
    assert "no event: " in out


def test_tail_of_an_empty_topic_says_so_beside_the_output(cli: Cli) -> None:
    assert cli.run("tail", "drops") == (0, "", "p.n.drops: no events yet\n")
    assert cli.run("tail", "drops", "--json") == (0, "", "")


def test_tail_follows(cli: Cli) -> None:
    command = [sys.executable, "-m", "streamrft.deploy.cli", "tail", "trajectories", "--json", "-f"]
    process = subprocess.Popen(
        [*command, "--config", str(cli.config)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        for group in (7, 8):  # the second comes when the first was told
            with cli.place() as place:
                append(place, "trajectories", trajectory(group, 0))
            told = json.loads(process.stdout.readline())
            assert told["event"]["group_id"] == f"rows.{group}"
    finally:
        process.kill()
        process.communicate()


def test_an_unknown_topic_names_the_nearest(cli: Cli) -> None:
    code, _, err = cli.run("tail", "reward")
    assert code == 2
    assert "Did you mean 'rewards'?" in err


def test_output_into_a_closed_pipe_ends_quietly(cli: Cli) -> None:
    with cli.place() as place:
        append(place, "trajectories", *(trajectory(g, 0) for g in range(500)))
    command = (
        f"{sys.executable} -m streamrft.deploy.cli tail trajectories -n 500 -c {cli.config} | true"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=90)
    assert done.stderr == ""
