"""The learning rate as a function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from ...schemas.errors import ConfigError
from ..settings import OptimizerSettings


def warmup_steps(settings: OptimizerSettings, total_steps: int | None) -> int:
    """Steps of warm-up: lr_warmup_steps, or with -1 the ratio of total_steps.

    Raises:
        ConfigError: the ratio is needed and total_steps is unknown.
    """
    if settings.lr_warmup_steps >= 0:
        return settings.lr_warmup_steps
    if settings.lr_warmup_steps_ratio == 0:
        return 0
    if total_steps is None:
        raise ConfigError(
            "algorithm.optimizer.lr_warmup_steps_ratio needs a known number of steps. Set "
            "buffer.total_steps, or give lr_warmup_steps."
        )
    return round(settings.lr_warmup_steps_ratio * total_steps)


def check(settings: OptimizerSettings, total_steps: int | None) -> None:
    """Raise ConfigError when the schedule cannot be computed."""
    if settings.lr_scheduler_type not in ("constant", "cosine"):
        raise ConfigError(
            f"algorithm.optimizer.lr_scheduler_type: {settings.lr_scheduler_type!r} is neither "
            "constant nor cosine."
        )
    if settings.lr_scheduler_type == "cosine" and total_steps is None:
        raise ConfigError(
            "algorithm.optimizer.lr_scheduler_type: cosine needs a known number of steps. Set "
            "buffer.total_steps, or use constant."
        )
    warmup_steps(settings, total_steps)


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int | None) -> float:
    """Rate of optimiser step `step`, the first being 1.

    Warm-up rises linearly and reaches lr at its last step, so no step has rate 0. After it,
    cosine falls from lr towards lr * min_lr_ratio, reached one step after total_steps.
    Source: SGDR, arXiv:1608.03983, eq. 5, one cycle.
    """
    warmup = warmup_steps(settings, total_steps)
    if step <= warmup:
        return settings.lr * step / warmup
    if settings.lr_scheduler_type == "constant" or total_steps is None:
        return settings.lr
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    low = settings.min_lr_ratio
    return settings.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
