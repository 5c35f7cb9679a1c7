from __future__ import annotations

import math

import pytest

from streamrft.consumers.learning.schedules import check, learning_rate
from streamrft.consumers.settings import OptimizerSettings
from streamrft.schemas.errors import ConfigError


def rates(settings: OptimizerSettings, total: int | None, steps: range) -> list[float]:
    return [learning_rate(settings, s, total) for s in steps]


def test_constant_keeps_the_rate_without_knowing_the_end():
    assert rates(OptimizerSettings(lr=0.5), None, range(1, 4)) == [0.5] * 3


def test_warm_up_rises_to_the_rate_and_no_step_has_none():
    settings = OptimizerSettings(lr=1.0, lr_warmup_steps=4)
    assert rates(settings, None, range(1, 7)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_may_be_a_ratio_of_the_steps():
    settings = OptimizerSettings(lr=1.0, lr_warmup_steps_ratio=0.2)
    assert rates(settings, 10, range(1, 4)) == [0.5, 1.0, 1.0]


def test_cosine_falls_from_the_rate_towards_its_least():
    settings = OptimizerSettings(
        lr=1.0, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1
    )
    found = rates(settings, 6, range(1, 9))
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert found == pytest.approx([0.5, 1.0, *falling, 0.1, 0.1])


def test_what_needs_the_number_of_steps_says_so():
    with pytest.raises(ConfigError, match="cosine needs a known number of steps"):
        check(OptimizerSettings(lr_scheduler_type="cosine"), None)
    with pytest.raises(ConfigError, match="lr_warmup_steps_ratio needs a known number"):
        check(OptimizerSettings(lr_warmup_steps_ratio=0.1), None)
