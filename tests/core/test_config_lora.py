"""The adapter in the configuration: what a trainer is told of it, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from config_files import planned

from streamrft.consumers.settings import LoraSettings
from streamrft.schemas.errors import ConfigError


def lora(tmp_path: Path, *entries: dict[str, Any]) -> tuple[LoraSettings | None, str | None]:
    trainer = planned(tmp_path, {"model": {"lora_configs": list(entries)}}).stages[0].trainer
    assert trainer is not None
    return trainer.lora, trainer.start_adapter


def test_a_rank_that_the_file_does_not_say_is_left_to_the_adapter(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    (start / "adapter_config.json").write_text("{}")
    new = LoraSettings(target_modules="all-linear", base_model_name="m")
    assert lora(tmp_path) == (None, None)
    assert lora(tmp_path, {"name": "a", "lora_dtype": "auto"}) == (new, None)
    said = dataclasses.replace(new, rank=8, alpha=16, target_modules=("q_proj", "v_proj"))
    entry = {"lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    assert lora(tmp_path, entry) == (said, None)
    named = dataclasses.replace(new, exclude_modules="gate_.*", base_model_name="org/m")
    entry = {"path": str(start), "exclude_modules": "gate_.*", "base_model_name": "org/m"}
    assert lora(tmp_path, entry) == (named, str(start))


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([{}, {}], "lora_configs: 2 adapters found; one is trained in a run"),
        ([{"lora_rank": 0}], r"lora_configs\[0\].lora_rank: 0 found; at least 1"),
        ([{"lora_alpha": 0}], r"lora_configs\[0\].lora_alpha: 0 found"),
        ([{"lora_dtype": "bfloat16"}], "lora_dtype: 'bfloat16' found; auto and float32"),
        ([{"target_modules": []}], "target_modules: empty"),
        ([{"exclude_modules": {"a": 1}}], "exclude_modules: .* found; a text"),
        ([{"path": "nowhere"}], "path: nowhere holds no adapter_config.json"),
        ([{"rank": 8}], "lora_rank"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(
    entries: list[dict[str, Any]], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        lora(tmp_path, *entries)


def test_keys_of_the_vllm_engine_do_nothing_and_say_so(tmp_path: Path) -> None:
    keys = {"fully_sharded_loras": True, "max_cpu_loras": 2}
    found = planned(tmp_path, {"model": keys}).warnings
    assert any(w.startswith("model.fully_sharded_loras, model.max_cpu_loras: ") for w in found), (
        found
    )
