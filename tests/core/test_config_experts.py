"""An expert's rows in the configuration: how many, from where, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import planned

from streamrft.deploy.config.load import merged
from streamrft.schemas.errors import ConfigError

ROWS = {"storage_type": "file", "path": "expert.jsonl", "format": {"messages_key": "turns"}}
MIX: dict[str, Any] = {
    "algorithm": {"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.2}},
    "buffer": {"trainer_input": {"auxiliary_buffers": {"sft_dataset": ROWS}}},
}


@pytest.mark.parametrize(
    "buffer, groups, rows",
    [
        ({"train_batch_size": 40}, 8, 8),
        ({"train_batch_size": 41}, 8, 9),
        ({"batch_size": 8}, 8, 8),
        ({"batch_size": 3}, 3, 3),
    ],
)
def test_a_share_of_the_batch_is_the_experts_and_the_rest_whole_groups(
    buffer: dict[str, int], groups: int, rows: int, tmp_path: Path
) -> None:
    stage = planned(tmp_path, merged(MIX, {"buffer": buffer})).stage(None)
    assert stage.trainer and stage.scheduler and stage.trainer.experts
    assert (stage.trainer.batch_groups, stage.scheduler.batch_size) == (groups, groups)
    assert stage.trainer.expert_rows == rows
    assert stage.trainer.experts.path == "expert.jsonl"
    assert stage.trainer.experts.messages_key == "turns" and stage.trainer.sft is None


def test_a_loss_alone_asks_for_rows_and_others_read_none(tmp_path: Path) -> None:
    args = {"sample_strategy": "mix", "sample_strategy_args": {"sft_dataset_name": "other"}}
    algorithm = {"algorithm_type": "grpo", "policy_loss_fn": "mix_chord"} | args
    buffer = {"trainer_input": {"auxiliary_buffers": {"other": ROWS}}}
    trainer = planned(tmp_path, {"algorithm": algorithm, "buffer": buffer}).stage(None).trainer
    assert trainer and trainer.experts and trainer.expert_rows == 32
    run = planned(tmp_path, {"buffer": buffer})
    trainer = run.stage(None).trainer
    assert trainer and trainer.experts is None and trainer.expert_rows == 0
    assert "auxiliary_buffers: only policy_loss_fn mix" in " ".join(run.warnings)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"buffer": {"trainer_input": {"auxiliary_buffers": {"sft_dataset": {"path": None}}}}},
         r"auxiliary_buffers\.sft_dataset: missing"),
        ({"algorithm": {"sample_strategy_args": {"sft_dataset_name": "x"}}},
         r"auxiliary_buffers\.x: missing"),
        ({"algorithm": {"sample_strategy_args": {"expert_data_ratio": 1.0}}},
         "expert_data_ratio: 1.0 found; a number between 0 and 1"),
        ({"algorithm": {"algorithm_type": "grpo", "sample_strategy": "mix"}},
         "sample_strategy: mix found, but only"),
        ({"algorithm": {"advantage_fn": "ppo"}}, "an expert's rows have no reward"),
        ({"buffer": {"train_batch_size": 42}},
         "42 found, 9 of an expert, no multiple of algorithm.repeat_times 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        planned(tmp_path, merged(MIX, changes))
