"""Configuration files: Trinity's load as they are, mistakes are named with their path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import planned
from omegaconf import OmegaConf

from streamrft.deploy.config.load import load
from streamrft.deploy.config.read import duration_ms
from streamrft.deploy.plan import Run, plan
from streamrft.producers.settings import Pacing
from streamrft.schemas.errors import ConfigError

SEED = Path(__file__).parent.parent / "data" / "gsm8k.seed.yaml"


def seed_run(tmp_path: Path, text: str | None = None) -> Run:
    path = tmp_path / "seed.yaml"
    named = (text or SEED.read_text()).replace("<project_name>", "proj")
    path.write_text(named.replace("<experiment_name>", "exp"))
    return plan(path)


def test_the_seed_file_loads_once_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MODEL_PATH", "some/model")
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    stage = seed_run(tmp_path).stage(None)
    assert stage.namespace == "proj.exp"
    assert stage.scheduler and stage.explorer and stage.trainer
    assert (stage.scheduler.batch_size, stage.scheduler.group_size) == (128, 8)
    assert stage.scheduler.pacing == Pacing("fixed", 1, 0, 2)
    assert stage.scheduler.pacing.allowed_staleness == 0
    assert stage.scheduler.total_epochs == 1
    taskset = stage.scheduler.tasksets[0]
    assert (taskset.name, taskset.path, taskset.subset_name) == ("gsm8k", "openai/gsm8k", "main")
    assert (taskset.prompt_key, taskset.response_key) == ("question", "answer")
    assert taskset.workflow == "math_workflow"
    assert (stage.explorer.max_prompt_tokens, stage.explorer.max_response_tokens) == (1024, 1024)
    assert stage.explorer.runner_per_model == 16
    assert stage.trainer.model_path == "some/model"
    assert stage.trainer.batch_groups == 128
    assert stage.trainer.algorithm.optimizer.lr == 1e-5
    assert stage.trainer.save_interval == 100
    assert stage.trainer.max_staleness == 0
    assert stage.trainer.checkpoint_uri == str(tmp_path / "proj" / "exp")


def test_the_seed_file_asks_for_names_first() -> None:
    with pytest.raises(ConfigError, match=r"project: '<project_name>' found.*only letters"):
        load(SEED)


def test_the_seed_file_warns_once_for_each_thing_that_does_nothing(tmp_path: Path) -> None:
    warnings = seed_run(tmp_path).warnings
    for start in (
        "cluster:",
        "buffer.explorer_input.eval_tasksets, explorer.eval_interval:",
        "explorer.rollout_model.engine_type: vllm is the default",
        "synchronizer.sync_method: nccl",
        "buffer.trainer_input.experience_buffer.path:",
    ):
        assert len([w for w in warnings if w.startswith(start)]) == 1, start
    assert len(warnings) == 5


def test_defaults_are_trinitys(tmp_path: Path) -> None:
    config = planned(tmp_path).config
    assert config.buffer.total_epochs == 1
    assert config.algorithm.optimizer.betas == (0.9, 0.999)
    assert config.explorer.max_timeout == 1800
    assert config.synchronizer.sync_timeout == 3600
    assert config.trainer.save_interval == 0
    assert config.explorer.rollout_model.engine_num == 1


MISTAKES = [
    ("buffer.batch_sise=8", r"^buffer\.batch_sise: unknown key. Did you mean buffer\.batch_size\?"),
    ("batch_size=8", r"^batch_size: unknown key. Did you mean buffer\.batch_size\?"),
    ("algorithm.optimizer.learning=1", r"^algorithm\.optimizer\.learning: unknown key"),
    (
        "buffer.batch_size=eight",
        r"^buffer\.batch_size: 'eight' \(text\) found; allowed is a whole number",
    ),
    ("buffer.batch_size=1.5", r"^buffer\.batch_size: 1\.5"),
    ("buffer.batch_size=null", r"^buffer\.batch_size: nothing \(null\) found"),
    ("buffer.batch_size=true", r"^buffer\.batch_size: True \(true/false\) found"),
    (
        "buffer=[]",
        r"^buffer: \[\] \(a list\) found; allowed is a mapping of keys to values, with batch",
    ),
    ("name=a b", r"^name: 'a b' found.*only letters"),
    ("name=3", r"^name: 3 .*text \(put it in quotes\)"),
    ("name=..", r"^name: '\.\.' found.*not dots alone"),
    ("branch=. & resume_from=global_step_2", r"^branch: '\.' found.*not dots alone"),
    ("stages=[{stage_name: ..}]", r"stage_name: '\.\.' found.*not\s+dots alone"),
    ("algorithm.optimizer.lr=-0.001", r"^algorithm\.optimizer\.lr: -0\.001 found; at least 0"),
    ("algorithm.optimizer.betas=[0.9, 1.5]", r"betas: \[0\.9, 1\.5\] found; two numbers.*below 1"),
    ("algorithm.optimizer.betas=[0.9]", r"betas: \[0\.9\] found; two numbers"),
    ("model.temperature=-1", r"^model\.temperature: -1.* found; at least 0"),
    ("model.top_p=2", r"^model\.top_p: 2.* found; 0 to 1 is allowed"),
    (
        "buffer.explorer_input.taskset.rollout_args.top_p=1.5",
        r"^buffer\.explorer_input\.taskset\.rollout_args\.top_p: 1\.5 found; 0 to 1",
    ),
    ("trainer.max_token_len_per_gpu=0", r"^trainer\.max_token_len_per_gpu: 0 found; at least 1"),
    ("trainer.num_threads=0", r"^trainer\.num_threads: 0 found; at least 1"),
    ("seed=-1", r"^seed: -1 found; at least 0"),
    ("explorer.max_timeout=0", r"^explorer\.max_timeout: 0.* found; seconds above 0"),
    ("rewards.human.max_staleness=-1", r"^rewards\.human\.max_staleness: -1 found; at least 0"),
    (
        "buffer.explorer_input.taskset.data_selector.selector_type=shufle",
        r"selector_type: 'shufle' found; allowed are sequential, shuffle, random",
    ),
    ("streams.on_deadline=defualt", r"partial, default, drop\. Did you mean default\?"),
    ("mode=bench", r"^mode: bench is not in this version"),
    ("mode=fast", r"^mode: 'fast' found; allowed are both, explore"),
    (
        "algorithm.algorithm_type=jsd",
        r"'jsd' waits for a teacher's log-probs.*choose one of asymre, ",
    ),
    ("algorithm.algorithm_type=grpoo", r"'grpoo' is unknown. Did you mean 'grpo'\?"),
    ("algorithm.algorithm_type=sft", r"^mode: both with algorithm_type sft.*mode: train"),
    ("buffer.train_batch_size=30", r"30 found, no multiple of algorithm\.repeat_times 4.*28 or 32"),
    ("buffer.explorer_input.taskset.name=''", r"taskset\.name: missing"),
    (
        "buffer.explorer_input.taskset.name='a b'",
        r"^buffer\.explorer_input\.taskset\.name: 'a b' f",
    ),
    ("buffer.explorer_input.taskset.path=null", r"taskset\.path: missing"),
    (
        "buffer.total_steps=3 & trainer.total_steps=4",
        r"^buffer\.total_steps: 3 and trainer\.total_steps: 4",
    ),
    ("buffer.total_steps=0", r"^buffer\.total_steps: 0 found; at least 1"),
    ("model.max_model_len=null", r"^model\.max_model_len: missing"),
    (
        "model.max_prompt_tokens=300 & model.max_response_tokens=300",
        r"512 found, less than max_prompt_tokens 300 \+ max_response_tokens 300 = 600",
    ),
    ("model.max_response_tokens=512", r"leaves 0 tokens for the prompt"),
    ("model.min_response_tokens=300", r"300 found, more than max_response_tokens 256"),
    (
        "synchronizer.sync_offset=1 & synchronizer.max_staleness=0",
        r"max_staleness: 0 found.*Raise it to 1",
    ),
    (
        "synchronizer.sync_style=fully_async & synchronizer.sync_interval=4",
        r"max_staleness: 2 found, below sync_interval - 1 = 3",
    ),
    ("algorithm.optimizer.lr_scheduler_type=cosine", r"need to know the end"),
    ("streams.min_group_size=5", r"groups have algorithm\.repeat_times = 4"),
    ("rewards.human.deadline=3 weeks", r"^rewards\.human\.deadline: '3 weeks'.*3d, 2h"),
    ("rewards.human.dedline=3d", r"Did you mean rewards\.human\.deadline\?"),
    (
        "rewards.human.deadline=3d & event_log.retention.trajectories=2d",
        r"retention\.trajectories: 48 h found; .* is 73 h",
    ),
    ("rewards.human={} & event_log.retention.rewards=9d", r"human has no deadline"),
    ("event_log.retention.reward=9d", r"no such topic"),
    ("explorer.rollout_model.api_key=sk-1", r"api_key: a secret stands in the file.*oc\.env"),
    ("event_log.url=kafka://me:pw@host:9092", r"event_log\.url: a secret stands in the file"),
    ("explorer.rollout_model.engine_type=vlm", r"'vlm' found; allowed are vllm"),
    ("resume_from=step 90", r"global_step_N or <branch>/global_step_N"),
    ("branch=other", r"'other' without resume_from"),
    ("streams.partitions=2 & event_log.partitions=3", r"are the same number"),
    ("stages=[{mode: train}]", r"^stages\[0\]\.stage_name: missing"),
    ("stages=[{stage_name: a, nme: 1}]", r"^stages\[0\]\.nme: unknown key"),
    ("stages=[{stage_name: a, project: x}]", r"belongs to the whole run"),
    ("stages=[{stage_name: a}, {stage_name: a}]", r"used twice"),
    (
        "stages=[{stage_name: a, buffer: {train_batch_size: 30}}]",
        r"^stages\[a\]: buffer\.train_batch_size: 30",
    ),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_mistake_names_its_place_and_the_mend(text: str, expected: str, tmp_path: Path) -> None:
    changes = OmegaConf.to_container(OmegaConf.from_dotlist(text.split(" & ")))
    assert isinstance(changes, dict)
    with pytest.raises(ConfigError, match=expected):
        planned(tmp_path, {str(key): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "no valid YAML"),
        ("- a", "a list found"),
        ("model: {model_path: ${x.y}}", r'needs quotes: "\$\{\.\.\.\}"\.$'),
        (
            "project: ${oc.env:NOT_SET}",
            "Environment variable 'NOT_SET' not found. Set it",
        ),
        ("project: ${a.b}", "yaml: project: Interpolation key 'a.b' not found. Write "),
        ("project: ${nowhere}", "nowhere"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as found:
        load(path)
    assert str(path) in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: no such file"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3d", 259_200_000), ("2h", 7_200_000), ("15m", 900_000), ("90s", 90_000), ("250ms", 250),
     ("1.5s", 1_500), ("0", 0), (1_000, 1_000)],
)  # fmt: skip
def test_durations_are_milliseconds(text: Any, expected: int) -> None:
    assert duration_ms(text, "here") == expected


def test_environment_variables_fill_in_and_numbers_stay_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LR", "3e-4")
    run = planned(
        tmp_path,
        {
            "algorithm": {"optimizer": {"lr": "${oc.env:LR}"}},
            "buffer": {"batch_size": "${oc.env:NOT_SET_ANYWHERE,16}"},
        },
    )
    assert run.config.algorithm.optimizer.lr == 3e-4
    assert run.config.buffer.batch_size == 16


def test_every_stage_keeps_the_hugging_face_model_that_the_next_begins_with(tmp_path: Path) -> None:
    def kept(value: str, **more: Any) -> list[str]:
        run = planned(tmp_path, {"trainer": {"save_hf_checkpoint": value}, **more})
        return [s.trainer.save_hf_checkpoint for s in run.stages if s.trainer]

    stages = {"stages": [{"stage_name": "first"}, {"stage_name": "second"}]}
    assert [kept(value) for value in ("always", "last", "never")] == [
        ["always"],
        ["last"],
        ["never"],
    ]
    assert kept("never", **stages) == ["last", "last"]
    assert kept("always", **stages) == ["always", "always"]
