"""Commands as Trinity-RFT's documentation writes them, under this program's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from streamrft.deploy.cli import main

FILES = Path(__file__).parents[1] / "data" / "trinity"
ABSENT = [
    "studio --port 8501",
    "debug --config x.yaml --module workflow --output-dir out --disable-overwrite",
    "view --url sqlite:///x.db --table t --tokenizer m --port 8502",
    "log -d logs -k error -l WARNING -n 20 --no-color",
    "perf run -m explorer",
]


@pytest.fixture(autouse=True)
def trinitys_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECKPOINT_ROOT_DIR", "TASKSET_PATH", "MODEL_PATH"):
        monkeypatch.setenv(f"TRINITY_{name}", str(tmp_path / name.lower()))


def derived(capsys: pytest.CaptureFixture[str], *words: str):
    assert main(words) == 0
    return OmegaConf.create(capsys.readouterr().out).derived


@pytest.mark.parametrize("option", ["--config", "-c"])
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_run_takes_a_configuration_and_folders_of_plugins(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(FILES / f"{name}.yaml")
    shown = derived(capsys, "run", option, file, "--plugin-dir", str(tmp_path), "--dry-run")
    assert shown.processes == ["trainer"]
    assert shown.job_dir == str(tmp_path / "checkpoint_root_dir" / "faults" / "small")


def test_run_mixes_an_experts_rows_into_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = derived(capsys, "run", "--config", str(FILES / "mix.yaml"), "--dry-run")
    assert (shown.groups_a_step, shown.experiences_a_step) == (4, 16)


def test_run_takes_all_stages_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    shown = derived(capsys, "run", "--config", str(FILES / "stages.yaml"), "--dry-run")
    assert [stage.stage for stage in shown.stages] == ["sft_warmup", "rft", "preferences"]
    assert [stage.model for stage in shown.stages][1:] == [
        "last checkpoint of stage sft_warmup",
        "last checkpoint of stage rft",
    ]


@pytest.mark.parametrize(
    "options",
    [
        "--checkpoint-dir {job} --base-model-dir {model}",
        "-c {job}/global_step_10 -b {model}",
        "--checkpoint-dir {job} --base-model-dir {model} --step 10",
        "-c {job} -b {model} -s 10 -s 20",
    ],
)
def test_convert_takes_a_folder_a_base_model_and_steps(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a folder without checkpoints it fails for that, and not for how it was called."""
    (tmp_path / "job").mkdir()
    words = options.format(job=tmp_path / "job", model=tmp_path).split()
    assert main(["convert", *words]) == 1
    assert "global_step" in capsys.readouterr().err


@pytest.mark.parametrize("command", ABSENT)
def test_a_command_of_a_later_part_says_so_by_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(
        f"streamrft {command.split()[0]}: not in this version. "
    )


def test_an_option_for_a_cluster_of_ray_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(FILES / "sft.yaml"), "--dlc"]) == 2
    assert "--dlc: it would start a Ray cluster" in capsys.readouterr().err
