"""What a stage takes over from the rest of the file, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import planned

from streamrft.schemas.errors import ConfigError

ROWS = {"experience_buffer": {"storage_type": "file", "path": "sft.jsonl"}}
WARM: dict[str, Any] = {
    "stage_name": "warm",
    "mode": "train",
    "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-4}},
    "buffer": {"train_batch_size": 6, "total_steps": 2, "trainer_input": ROWS},
}
RL: dict[str, Any] = {
    "algorithm": {
        "policy_loss_fn": "gspo",
        "policy_loss_fn_args": {"clip_range_low": 0.1},
        "advantage_fn_args": {"epsilon": 1e-5},
        "kl_loss_fn": "k3",
        "optimizer": {"weight_decay": 0.5},
    },
    "buffer": {"total_steps": 90},
}


def test_a_stage_of_another_algorithm_takes_the_optimiser_and_no_function(tmp_path: Path) -> None:
    warm, rft = planned(tmp_path, RL | {"stages": [WARM, {"stage_name": "rft"}]}).stages
    assert warm.trainer and rft.trainer
    own, above = warm.trainer.algorithm, rft.trainer.algorithm
    assert (own.optimizer.lr, own.optimizer.weight_decay) == (1e-4, 0.5)
    assert (own.policy_loss_fn, own.advantage_fn, own.kl_loss_fn) == (None, None, None)
    assert above.policy_loss_fn and above.policy_loss_fn.args == {"clip_range_low": 0.1}
    assert (warm.trainer.total_steps, rft.trainer.total_steps) == (2, 90)


def test_a_stage_of_the_same_algorithm_takes_its_functions(tmp_path: Path) -> None:
    change = {"policy_loss_fn_args": {"clip_range_high": 0.2}}
    for own in (change, change | {"algorithm_type": "grpo"}):
        stages = [{"stage_name": "a", "algorithm": own}]
        (stage,) = planned(tmp_path, RL | {"stages": stages}).stages
        assert stage.trainer and stage.trainer.algorithm.policy_loss_fn
        args = stage.trainer.algorithm.policy_loss_fn.args
        assert args == {"clip_range_low": 0.1, "clip_range_high": 0.2}


@pytest.mark.parametrize(
    "above", [{"buffer": {"total_steps": 90}}, {"trainer": {"total_steps": 9}}]
)
@pytest.mark.parametrize(
    "own, steps",
    [
        ({"buffer": {"total_epochs": 3}}, None),
        ({"buffer": {"total_steps": 4}}, 4),
        ({"trainer": {"total_steps": 5}}, 5),
        ({"trainer": {"save_interval": 5}}, 90),
    ],
)
def test_the_end_that_a_stage_names_is_its_end(
    above: dict[str, Any], own: dict[str, Any], steps: int | None, tmp_path: Path
) -> None:
    (stage,) = planned(tmp_path, above | {"stages": [{"stage_name": "a"} | own]}).stages
    assert stage.trainer
    inherits = steps == 90
    assert stage.trainer.total_steps == (
        next(iter(above.values()))["total_steps"] if inherits else steps
    )


@pytest.mark.parametrize(
    "own, match",
    [
        ({"algorithm": {"algorithm_type": "sft"}}, r"stages\[b\]: mode: both with .* sft"),
        ({"algorithm": {"algorithm_type": "jsd"}}, r"stages\[b\]: .*'jsd' waits for a"),
        ({"algorithm": {"lr": 1}}, r"stages\[1\]\.algorithm\.lr: unknown key"),
        ({"algorithm": 3}, r"stages\[1\]\.algorithm: 3"),
        ({"buffer": {"total_steps": 0}}, r"stages\[b\]: buffer\.total_steps: 0"),
        ({"model": {"chat_template_path": "none"}}, r"stages\[b\]: model\.chat_template_path"),
    ],
)  # fmt: skip
def test_an_error_names_the_stage(own: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        planned(tmp_path, {"stages": [{"stage_name": "a"}, {"stage_name": "b"} | own]})
