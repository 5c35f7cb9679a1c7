"""What the values of a configuration come to: lengths, pacing, sources, stages, warnings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_files import planned, with_changes

from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings
from streamrft.deploy.plan import plan
from streamrft.deploy.run import resolved_text
from streamrft.schemas.errors import ConfigError


@dataclass(frozen=True)
class LengthCase:
    model: dict[str, int | None]
    expected: tuple[int, int, int]


@pytest.mark.parametrize(
    "case",
    [
        LengthCase({"max_model_len": 512}, (256, 256, 512)),
        LengthCase({"max_model_len": 16384}, (8192, 8192, 16384)),
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
    assert stage.trainer.max_tokens_per_microbatch == max(2 * case.expected[2], 8192)


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
    run = planned(tmp_path, {"rewards": rewards})
    stage = run.stage(None)
    assert stage.explorer and stage.trainer and run.warnings == ()
    assert stage.explorer.reward_sources["human"].deadline_ms == 259_200_000
    assert stage.explorer.reward_sources["judge"].weight == 1.0
    assert stage.explorer.part_weights["format"] == 0.1
    assert stage.trainer.source_max_staleness == {"human": None, "judge": 4}


def test_a_source_that_may_score_too_late_is_said_and_no_clock_decides_in_a_deterministic_run(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {"rewards": {"human": {"deadline": "3d"}, "judge": {"deadline": 500}}}
    run = planned(tmp_path, changes)
    assert [w.split(":")[0] for w in run.warnings] == ["rewards.human"]
    exact = planned(tmp_path, {**changes, "deterministic": True})
    waits = [r.stage(None).scheduler for r in (run, exact)]
    assert [w.reward_wait_ms for w in waits if w] == [60_000, None]
    assert exact.warnings == ()


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


def test_a_correction_recomputes_old_log_probs_unless_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    def settings(**algorithm: Any) -> AlgorithmSettings:
        trainer = planned(tmp_path, {"algorithm": algorithm}).stage(None).trainer
        assert trainer
        return trainer.algorithm

    assert settings().bypass_old_logprobs and settings().rollout_correction is None
    assert not settings(bypass_old_logprobs=False).bypass_old_logprobs
    corrected = settings(rollout_correction={"rollout_is": "token"})
    assert not corrected.bypass_old_logprobs
    assert corrected.rollout_correction == {"rollout_is": "token"}
    with pytest.raises(ConfigError, match=r"rollout_correction\.rollout_is: 'token' does nothing"):
        settings(rollout_correction={"rollout_is": "token"}, bypass_old_logprobs=True)
    with pytest.raises(ConfigError, match="'rollout_iss' is unknown. Did you mean 'rollout_is'"):
        settings(rollout_correction={"rollout_iss": "token"})
    with pytest.raises(ConfigError, match="rollout_correction: found with algorithm_type dpo"):
        settings(algorithm_type="dpo", rollout_correction={"rollout_is": "token"})


def test_a_kl_penalty_reaches_the_trainer(tmp_path: Path) -> None:
    algorithm = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}}
    trainer = planned(tmp_path, {"algorithm": algorithm}).stage(None).trainer
    assert trainer and trainer.algorithm.kl_penalty_fn
    assert trainer.algorithm.kl_penalty_fn == FunctionSettings("k1", {"kl_coef": 0.1})


@pytest.mark.parametrize(
    ("algorithm", "source"),
    [
        ({"algorithm_type": "on_policy_distill"}, "a teacher's log-probs"),
        ({"algorithm_type": "jsd"}, "a teacher's log-probs"),
        ({"algorithm_type": "gigpo"}, "states of the environment"),
        ({"advantage_fn": "remax"}, "the reward of a greedy rollout"),
    ],
)
def test_what_waits_for_a_source_says_so_at_load(
    algorithm: dict[str, Any], source: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"waits for {source}.*choose one of asymre"):
        planned(tmp_path, {"algorithm": algorithm})


def test_dpo_takes_pairs_of_a_file(tmp_path: Path) -> None:
    form = {"prompt_type": "chatpair", "chosen_key": "good", "rejected_key": "bad"}
    rows = {"storage_type": "file", "path": "pairs.jsonl", "format": form}
    changes = {
        "mode": "train",
        "algorithm": {"algorithm_type": "dpo"},
        "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": rows}},
    }
    run = planned(tmp_path, changes)
    trainer = run.stage(None).trainer
    assert trainer and trainer.sft and trainer.sft.is_pairs
    assert (trainer.sft.chosen_key, trainer.sft.rejected_key) == ("good", "bad")
    assert trainer.sft.prompt_type == "messages" and trainer.train_batch_size == 4
    with pytest.raises(ConfigError, match="mode: both with algorithm_type dpo.*mode: train"):
        planned(tmp_path, {**changes, "mode": "both"})


def test_kto_takes_verdicts_of_a_file(tmp_path: Path) -> None:
    rows = {"storage_type": "file", "path": "rows.jsonl", "format": {"label_key": "good"}}
    changes = {
        "mode": "train",
        "algorithm": {"algorithm_type": "kto"},
        "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": rows}},
    }
    trainer = planned(tmp_path, changes).stage(None).trainer
    assert trainer and trainer.sft and trainer.sft.label_key == "good"
    with pytest.raises(ConfigError, match="train_batch_size: 1 prompts a step found; kto"):
        planned(tmp_path, {**changes, "buffer": {**changes["buffer"], "train_batch_size": 1}})
    changes["algorithm"] = {"algorithm_type": "sft"}
    run = planned(tmp_path, changes)
    trainer = run.stage(None).trainer
    assert trainer and trainer.sft and trainer.sft.label_key is None
    assert "format.label_key: only algorithm_type kto reads verdicts" in " ".join(run.warnings)


def test_preferences_without_a_file_come_from_the_log(tmp_path: Path) -> None:
    for kind, groups in (("dpo", 6), ("kto", 3)):
        algorithm = {"algorithm_type": kind, "repeat_times": 2}
        buffer = {"train_batch_size": 6}
        stage = planned(tmp_path, {"algorithm": algorithm, "buffer": buffer}).stage(None)
        assert stage.trainer and stage.scheduler and stage.trainer.sft is None
        assert (stage.trainer.batch_groups, stage.scheduler.batch_size) == (groups, groups)
    for changes, match in (
        ({"algorithm": {"algorithm_type": "dpo", "repeat_times": 1}}, "repeat_times: 1 found; dpo"),
        ({"algorithm": {"algorithm_type": "kto"}, "buffer": {"batch_size": 1}}, "1 prompts a step"),
        (
            {
                "algorithm": {"algorithm_type": "kto", "repeat_times": 8},
                "buffer": {"train_batch_size": 8},
            },
            "train_batch_size: 1 prompts a step found; kto",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            planned(tmp_path, changes)


def test_keys_of_another_algorithm_are_named(tmp_path: Path) -> None:
    rows = {"format": {"chosen_key": "good"}}
    changes = {
        "model": {"critic_model_path": "other"},
        "trainer": {"critic_warmup": 2},
        "buffer": {"trainer_input": {"experience_buffer": rows}},
    }
    warnings = " ".join(planned(tmp_path, changes).warnings)
    assert "model.critic_model_path, trainer.critic_warmup: only advantage_fn ppo" in warnings
    assert "format.chosen_key: only algorithm_type dpo reads pairs" in warnings
    ppo = planned(tmp_path, {**changes, "algorithm": {"algorithm_type": "ppo"}})
    assert "critic" not in " ".join(ppo.warnings)
    trainer = ppo.stage(None).trainer
    assert trainer and (trainer.critic_model_path, trainer.critic_warmup) == ("other", 2)


def test_continued_pre_training_takes_whole_texts(tmp_path: Path) -> None:
    rows = {"storage_type": "file", "path": "texts.jsonl", "format": {"prompt_key": "text"}}
    changes = {
        "mode": "train",
        "algorithm": {"algorithm_type": "cpt"},
        "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": rows}},
    }
    trainer = planned(tmp_path, changes).stage(None).trainer
    assert trainer and trainer.sft and trainer.sft.whole_text
    assert trainer.sft.prompt_key == "text"


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


def test_rollouts_are_not_looked_for_in_a_file(tmp_path: Path) -> None:
    rows = {"storage_type": "file", "path": "rows.jsonl"}
    changes = {"mode": "train", "buffer": {"trainer_input": {"experience_buffer": rows}}}
    with pytest.raises(ConfigError, match="storage_type: file found, but grpo trains rollouts"):
        planned(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"monitor": {"monitor_type": "wandb"}}, "monitor:"),
        ({"model": {"max_cpu_loras": 2}}, "model.max_cpu_loras:"),
        ({"trainer": {"trainer_config": {"a": 1}}}, "trainer.trainer_config:"),
        ({"synchronizer": {"sync_style": "trainer_driven"}}, "synchronizer.sync_style:"),
        ({"explorer": {"over_rollout": {"ratio": 0.2}}}, "explorer.over_rollout:"),
        (
            {"buffer": {"trainer_input": {"experience_buffer": {"format": {"image_key": "t"}}}}},
            "buffer.trainer_input.experience_buffer.format.image_key:",
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
    with pytest.raises(ConfigError, match="^--stage: missing; name one of a, b"):
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
    changes = {"buffer": {"explorer_input": {"taskset": {"workflow_args": args}}}}
    explorer = planned(tmp_path, changes).stage(None).explorer
    assert explorer and explorer.tasksets[0].workflow_args == args


def test_configuration_is_imported_without_what_roles_need() -> None:
    script = (
        "import sys, streamrft.deploy.plan\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'omegaconf', 'fastavro'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
