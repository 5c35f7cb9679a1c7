"""Rows of files that are trained: alone, or of an expert beside the rollouts of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...consumers.algorithms.catalogue import algorithm_type, has_critic, reads_experts
from ...consumers.settings import SftSource
from ...schemas.errors import ConfigError
from .buffer import ExperienceBuffer
from .schema import Config

_RATIO, _NAME = "expert_data_ratio", "sft_dataset_name"
_DEFAULTS: Mapping[str, Any] = {_RATIO: 0.5, _NAME: "sft_dataset"}
_PLACE = "buffer.trainer_input.auxiliary_buffers"


def trained_rows(config: Config) -> SftSource:
    """The rows of a run that trains nothing else."""
    rows = config.buffer.trainer_input.experience_buffer
    assert rows is not None
    schema = algorithm_type(config.algorithm.algorithm_type).schema
    place = "buffer.trainer_input.experience_buffer"
    return _rows_of(rows, schema, place, total_epochs=config.buffer.total_epochs)


def mixes_experts(config: Config) -> bool:
    """Whether every step has rows of an expert."""
    section = config.algorithm
    return reads_experts(section.algorithm_type, section.policy_loss_fn)


def expert_source(config: Config) -> SftSource | None:
    """The expert's rows; None where the policy loss reads none.

    Raises:
        ConfigError: the loss reads them and the file names none, or the other way round.
    """
    section = config.algorithm
    if not mixes_experts(config):
        if section.sample_strategy == "mix":
            raise ConfigError(
                "algorithm.sample_strategy: mix found, but only policy_loss_fn mix and mix_chord "
                "read an expert's rows. Set algorithm_type: mix."
            )
        return None
    if has_critic(section.algorithm_type, section.advantage_fn):
        raise ConfigError("algorithm.advantage_fn: ppo found; an expert's rows have no reward.")
    name = _args(config)[_NAME]
    buffer = config.buffer.trainer_input.auxiliary_buffers.get(name)
    if buffer is None or buffer.storage_type != "file" or not buffer.path:
        raise ConfigError(
            f"{_PLACE}.{name}: missing; policy_loss_fn mix and mix_chord train an expert's rows "
            "beside the rollouts. Give it a storage_type: file and a path."
        )
    return _rows_of(buffer, "sft", f"{_PLACE}.{name}", total_epochs=1)


def expert_rows(config: Config) -> int:
    """Rows of an expert a step: a share of train_batch_size, or on top where that is not given."""
    if not mixes_experts(config):
        return 0
    ratio, buffer = _args(config)[_RATIO], config.buffer
    if buffer.train_batch_size:
        return math.ceil(ratio * buffer.train_batch_size)
    return math.ceil(ratio / (1 - ratio) * buffer.batch_size * config.algorithm.repeat_times)


def _args(config: Config) -> Mapping[str, Any]:
    args = {**_DEFAULTS, **(config.algorithm.sample_strategy_args or {})}
    ratio = args[_RATIO]
    if not isinstance(ratio, float | int) or not 0 < ratio < 1:
        raise ConfigError(
            f"algorithm.sample_strategy_args.{_RATIO}: {ratio!r} found; a number between 0 and 1 "
            "is allowed."
        )
    return args


def _rows_of(rows: ExperienceBuffer, schema: str, place: str, *, total_epochs: int) -> SftSource:
    assert rows.path is not None
    form = rows.format
    if form.prompt_type == "chatpair" and schema not in ("dpo", "kto"):
        raise ConfigError(
            f"{place}.format.prompt_type: chatpair is for DPO; messages or plaintext is allowed."
        )
    return SftSource(
        path=rows.path,
        split=rows.split,
        subset_name=rows.subset_name,
        prompt_type="messages" if form.prompt_type == "chatpair" else form.prompt_type,
        prompt_key=form.prompt_key,
        response_key=form.response_key,
        messages_key=form.messages_key,
        tools_key=form.tools_key or "tools",
        system_prompt=form.system_prompt,
        system_prompt_key=form.system_prompt_key,
        total_epochs=total_epochs,
        shuffle=rows.data_selector.selector_type != "sequential",
        whole_text=schema == "cpt",
        is_pairs=schema == "dpo",
        chosen_key=form.chosen_key,
        rejected_key=form.rejected_key,
        label_key=form.label_key if schema == "kto" else None,
    )
