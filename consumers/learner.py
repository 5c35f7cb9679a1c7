"""One optimiser step after another on a causal language model: the torch half of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .examples import TrainingExample
from .settings import TrainerSettings


class Learner:
    """Model, optimiser and algorithm of one trainer process.

    `step` may be called with any batch at any step number: the learning rate is a function of
    the step, so that weights, `optimizer_state` and `rng_state` are all there is to save.
    """

    def __init__(self, settings: TrainerSettings, *, total_steps: int | None) -> None:
        """Load model and tokenizer from `settings.model_path`.

        Raises:
            ConfigError: an unknown algorithm, function or argument, or a schedule that needs
                total_steps without it.
        """
        raise NotImplementedError

    def step(self, examples: Sequence[TrainingExample], *, step: int) -> dict[str, float]:
        """Train on one batch; `step` is 1 for the first optimiser step. Returns metrics.

        The metrics are the contract's actor/*, reward/*, response_length/mean, num_groups,
        time/train_s and perf/tokens_per_s. A batch without a trained token, or with a gradient
        that is not finite, leaves weights and optimiser as they were: actor/skipped_updates 1.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights as model.safetensors holds them: on the CPU, a tied head left out."""
        raise NotImplementedError

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights in place; names as in `state_dict`."""
        raise NotImplementedError

    def save_hf(self, folder: Path) -> str:
        """Write the Hugging Face folder; returns the sha256 of model.safetensors.

        config.json, generation_config.json, tokenizer files, chat_template.jinja and one
        model.safetensors, whose bytes are a function of the weights alone.
        """
        raise NotImplementedError

    def optimizer_state(self) -> dict[str, Any]:
        """For torch.save; loads with weights_only=True."""
        raise NotImplementedError

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Undo `optimizer_state`."""
        raise NotImplementedError

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Random generators of torch, for torch.save."""
        raise NotImplementedError

    def load_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Undo `rng_state`."""
        raise NotImplementedError
