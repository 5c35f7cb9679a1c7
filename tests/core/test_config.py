"""Configuration files: Trinity's load as they are, mistakes are named with their path."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from streamrft.deploy.config.load import load, merged
from streamrft.deploy.config.read import duration_ms
from streamrft.deploy.plan import Run, plan
from streamrft.deploy.run import resolved_text
from streamrft.producers.settings import Pacing
from streamrft.schemas.errors import ConfigError

SEED = Path(__file__).parent.parent / "data" / "gsm8k.seed.yaml"
BASE: dict[str, Any] = {
    "project": "p",
    "name": "n",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "m", "max_model_len": 512},
    "buffer": {
        "batch_size": 8,
        "explorer_input": {"taskset": {"name": "rows", "path": "rows.jsonl"}},
    },
    "explorer": {"rollout_model": {"engine_type": "transformers"}},
}


def with_changes(changes: dict[str, Any]) -> dict[str, Any]:
    return merged(copy.deepcopy(BASE), changes)


def planned(tmp_path: Path, changes: dict[str, Any] | None = None) -> Run:
    path = tmp_path / "run.yaml"
    config = with_changes({"checkpoint_root_dir": str(tmp_path / "runs")} | (changes or {}))
    path.write_text(json.dumps(config))
    return plan(path)


def seed_run(tmp_path: Path, text: str | None = None) -> Run:
    path = tmp_path / "seed.yaml"
    named = (text or SEED.read_text()).replace("<project_name>", "proj")
    path.write_text(named.replace("<experiment_name>", "exp"))
    return plan(path)


# --- Trinity's file


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


# --- mistakes


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
    ("buffer=[]", r"^buffer: \[\] \(a list\) found; allowed is a mapping"),
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
    ("algorithm.algorithm_type=ppo", r"'ppo' of Trinity is not available here"),
    ("algorithm.algorithm_type=gpro", r"'gpro' is unknown. Did you mean 'grpo'\?"),
    ("algorithm.algorithm_type=sft", r"^mode: both with algorithm_type sft.*mode: train"),
    ("buffer.train_batch_size=30", r"30 found, no multiple of algorithm\.repeat_times 4.*28 or 32"),
    ("buffer.explorer_input.taskset.name=''", r"taskset\.name: missing"),
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
        ("project: ${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
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


# --- what keys mean


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


@dataclass(frozen=True)
class LengthCase:
    model: dict[str, int | None]
    expected: tuple[int, int, int]


@pytest.mark.parametrize(
    "case",
    [
        LengthCase({"max_model_len": 512}, (256, 256, 512)),
        LengthCase({"max_response_tokens": 100}, (412, 100, 512)),
        LengthCase({"max_prompt_tokens": 100}, (100, 412, 512)),
        LengthCase({"max_prompt_tokens": 100, "max_response_tokens": 50}, (100, 50, 512)),
        LengthCase(
            {"max_model_len": None, "max_prompt_tokens": 100, "max_response_tokens": 50},
            (100, 50, 150),
        ),
    ],
    ids=str,
)
def test_lengths_follow_trinitys_arithmetic(case: LengthCase, tmp_path: Path) -> None:
    stage = planned(tmp_path, {"model": case.model}).stage(None)
    assert stage.explorer and stage.trainer
    found = (
        stage.explorer.max_prompt_tokens,
        stage.explorer.max_response_tokens,
        stage.trainer.max_sequence_tokens,
    )
    assert found == case.expected
    assert stage.trainer.max_tokens_per_microbatch == 2 * case.expected[2]


@pytest.mark.parametrize(
    ("changes", "groups"), [({}, 8), ({"train_batch_size": 16}, 4), ({"train_batch_size": 32}, 8)]
)
def test_both_batch_keys_give_groups_a_step(
    changes: dict[str, Any], groups: int, tmp_path: Path
) -> None:
    stage = planned(tmp_path, {"buffer": changes}).stage(None)
    assert stage.trainer and stage.scheduler
    assert stage.trainer.batch_groups == stage.scheduler.batch_size == groups


@pytest.mark.parametrize(
    ("sync", "allowed"),
    [
        ({}, 0),
        ({"sync_offset": 1}, 1),
        ({"sync_interval": 4}, 3),
        ({"sync_interval": 4, "sync_offset": 2}, 5),
        ({"sync_style": "fully_async"}, 2),
        ({"sync_style": "fully_async", "max_staleness": 7}, 7),
    ],
)
def test_pacing_is_one_number_and_the_trainers_bound(
    sync: dict[str, Any], allowed: int, tmp_path: Path
) -> None:
    stage = planned(tmp_path, {"synchronizer": sync}).stage(None)
    assert stage.trainer and stage.scheduler
    assert stage.scheduler.pacing.allowed_staleness == allowed
    assert stage.trainer.max_staleness == allowed


def test_reward_sources_reach_explorer_and_trainer(tmp_path: Path) -> None:
    rewards = {
        "human": {"weight": 0.5, "deadline": "3d", "max_staleness": None},
        "judge": {"deadline": 500, "max_staleness": 4},
        "format": {"weight": 0.1},
    }
    stage = planned(tmp_path, {"rewards": rewards}).stage(None)
    assert stage.explorer and stage.trainer
    assert stage.explorer.reward_sources["human"].deadline_ms == 259_200_000
    assert stage.explorer.reward_sources["judge"].weight == 1.0
    assert stage.explorer.part_weights["format"] == 0.1
    assert stage.trainer.source_max_staleness == {"human": None, "judge": 4}


def test_trinitys_operators_come_before_our_filters(tmp_path: Path) -> None:
    operators = [{"name": "reward_filter", "args": {"threshold": 0.5}}]
    changes = {
        "data_processor": {"experience_pipeline": {"operators": operators}},
        "streams": {"filters": [{"name": "length_filter"}]},
    }
    streams = planned(tmp_path, changes).stage(None).streams
    assert streams
    assert [f.name for f in streams.filters] == ["reward_filter", "length_filter"]
    assert streams.filters[0].args == {"threshold": 0.5}


def test_arguments_without_a_name_change_the_algorithms_own_function(tmp_path: Path) -> None:
    loss_args = {"clip_range": 0.3, "loss_agg_mode": "token-mean"}
    algorithm = {
        "kl_loss_fn_args": {"kl_coef": 0.1},
        "policy_loss_fn": "ppo",
        "policy_loss_fn_args": loss_args,
    }
    trainer = planned(tmp_path, {"algorithm": algorithm}).stage(None).trainer
    assert trainer and trainer.algorithm.kl_loss_fn and trainer.algorithm.policy_loss_fn
    assert trainer.algorithm.kl_loss_fn.name == "k2"
    assert trainer.algorithm.kl_loss_fn.args == {"kl_coef": 0.1}
    assert trainer.algorithm.policy_loss_fn.args == {"clip_range": 0.3}
    assert trainer.algorithm.loss_agg_mode == "token-mean"
    assert trainer.algorithm.advantage_fn is None


def test_dataset_path_is_an_alias_of_the_tasksets_path(tmp_path: Path) -> None:
    changes = {
        "data": {"dataset_path": "short.jsonl"},
        "buffer": {"explorer_input": {"taskset": {"name": "rows"}}},
    }
    config = with_changes(changes)
    del config["buffer"]["explorer_input"]["taskset"]["path"]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    scheduler = plan(path).stage(None).scheduler
    assert scheduler and scheduler.tasksets[0].path == "short.jsonl"


def test_an_old_name_is_taken_and_named(tmp_path: Path) -> None:
    run = planned(tmp_path, {"explorer": {"runner_num": 3}})
    assert run.config.explorer.runner_per_model == 3
    assert any(w.startswith("explorer.runner_num: an old name") for w in run.warnings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"monitor": {"monitor_type": "wandb"}}, "monitor:"),
        ({"model": {"lora_configs": [{"name": "a"}]}}, "model.lora_configs:"),
        ({"trainer": {"trainer_config": {"a": 1}}}, "trainer.trainer_config:"),
        ({"synchronizer": {"sync_style": "trainer_driven"}}, "synchronizer.sync_style:"),
        ({"streams": {"engine": "faust"}}, "streams.engine:"),
        ({"explorer": {"over_rollout": {"ratio": 0.2}}}, "explorer.over_rollout:"),
        (
            {"buffer": {"trainer_input": {"experience_buffer": {"format": {"tools_key": "t"}}}}},
            "buffer.trainer_input.experience_buffer.format.tools_key:",
        ),
    ],
)
def test_a_key_that_does_nothing_is_never_ignored_in_silence(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert [w for w in planned(tmp_path, changes).warnings if w.startswith(named)]


def test_a_key_that_says_what_is_done_anyway_is_no_warning(tmp_path: Path) -> None:
    changes = {"trainer": {"use_dynamic_bsz": True}, "synchronizer": {"sync_method": "checkpoint"}}
    assert planned(tmp_path, changes).warnings == ()


def test_event_log_is_a_url_or_a_section(tmp_path: Path) -> None:
    short = planned(tmp_path, {"event_log": f"sqlite:///{tmp_path}/other.db"})
    assert short.log_url == f"sqlite:///{tmp_path}/other.db"
    changes = {
        "event_log": {"partitions": 2, "max_event_bytes": 4096, "retention": {"rewards": "9d"}}
    }
    run = planned(tmp_path, changes)
    assert run.log_url == f"sqlite:///{tmp_path}/runs/p/n/log.db"
    specs = {run.stage(None).topics.short(s.name): s for s in run.topic_specs(run.stage(None))}
    assert (specs["rewards"].num_partitions, specs["tasks"].num_partitions) == (2, 64)
    assert specs["rewards"].retention_ms == 9 * 86_400_000
    assert specs["trajectories"].retention_ms is None
    assert specs["rewards"].max_event_bytes == 4096


# --- stages, forks


def test_stages_merge_deep_and_hand_over(tmp_path: Path) -> None:
    rows = {"storage_type": "file", "path": "sft.jsonl"}
    stages = [
        {
            "stage_name": "warm",
            "mode": "train",
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-4}},
            "buffer": {
                "train_batch_size": 6,
                "total_steps": 2,
                "trainer_input": {"experience_buffer": rows},
            },
        },
        {"stage_name": "rft"},
    ]
    optimizer = {"algorithm": {"optimizer": {"weight_decay": 0.5}}}
    run = planned(tmp_path, optimizer | {"stages": stages})
    warm, rft = run.stages
    assert warm.trainer and warm.trainer.sft and rft.trainer
    assert (warm.scheduler, warm.explorer, warm.streams) == (None, None, None)
    assert warm.trainer.algorithm.optimizer.lr == 1e-4
    assert warm.trainer.algorithm.optimizer.weight_decay == 0.5
    assert (warm.trainer.train_batch_size, warm.trainer.total_steps) == (6, 2)
    assert warm.trainer.sft.path == "sft.jsonl"
    assert (warm.namespace, rft.namespace) == ("p.n.warm", "p.n.rft")
    assert warm.job_dir == run.job_dir / "warm"
    assert rft.trainer.algorithm.algorithm_type == "grpo"
    assert rft.trainer.total_steps is None
    assert rft.after is warm
    assert run.log_url.endswith("/runs/p/n/log.db")


def test_a_stage_must_be_named_among_several(tmp_path: Path) -> None:
    run = planned(tmp_path, {"stages": [{"stage_name": "a"}, {"stage_name": "b"}]})
    assert run.stage("b").name == "b"
    with pytest.raises(ConfigError, match="None found; stages of .* are a, b"):
        run.stage(None)


@pytest.mark.parametrize(
    ("changes", "branch"),
    [
        ({}, "main"),
        ({"resume_from": "global_step_90"}, "main.90"),
        ({"resume_from": "main.90/global_step_120"}, "main.90.120"),
        ({"resume_from": "global_step_90", "branch": "again"}, "again"),
    ],
)
def test_a_fork_names_its_branch(changes: dict[str, Any], branch: str, tmp_path: Path) -> None:
    stage = planned(tmp_path, changes).stage(None)
    assert stage.scheduler and stage.trainer
    assert stage.scheduler.branch == branch
    assert stage.trainer.branch == (branch if changes else None)


def test_object_storage_takes_checkpoints_and_claims(tmp_path: Path) -> None:
    stage = planned(tmp_path, {"storage": {"uri": "s3://bucket/rl"}}).stage(None)
    assert stage.trainer and stage.explorer
    assert stage.trainer.checkpoint_uri == "s3://bucket/rl/p/n"
    assert stage.explorer.storage_uri == "s3://bucket/rl/p/n"


# --- what is shown, and how fast


def test_the_resolved_configuration_shows_every_value_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "sk-very-secret")
    changes = {"explorer": {"rollout_model": {"api_key": "${oc.env:KEY}"}}}
    text = resolved_text(planned(tmp_path, changes))
    assert "sk-very-secret" not in text
    assert "api_key: '********'" in text
    for shown in ("allowed_staleness: 0", "experiences_a_step: 32", "p.n.tasks: 64",
                  "min_lr_ratio: 0.01", "late_horizon: 3600000"):  # fmt: skip
        assert shown in text


def test_words_that_only_look_like_secrets_are_no_secrets(tmp_path: Path) -> None:
    args = {"eos_token": "</s>", "max_tokens": "8", "key": "k"}
    planned(tmp_path, {"buffer": {"explorer_input": {"taskset": {"workflow_args": args}}}})


def test_configuration_is_imported_without_what_roles_need() -> None:
    script = (
        "import sys, streamrft.deploy.plan\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'omegaconf', 'fastavro'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
