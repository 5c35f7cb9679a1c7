"""An adapter on two gloo ranks: the curve of one, and checkpoints for any number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_jobs import Kept, go_on_and_save, save, steps
from rank_team import start_team
from tiny_learner import learner, learner_settings, mixed
from torch import Tensor

from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import FunctionSettings, LoraSettings

pytestmark = pytest.mark.usefixtures("torch_as_before")
KL = FunctionSettings("k2", {"kl_coef": 0.5})


def assert_same_curve(found: Kept, expected: Kept) -> None:
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        for name in one.keys() - {"time/train_s", "perf/tokens_per_s"}:
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), name
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_started", [False, True], ids=["new", "with a start"])
def test_two_ranks_train_an_adapter_as_one_does_and_any_number_goes_on(
    tmp_path: Path, tiny_model_dir: Path, is_started: bool
) -> None:
    """KL to the model below, or to the start; activations computed again; one, two, one again."""
    changes = {"lora": LoraSettings(rank=4, alpha=8), "kl_loss_fn": KL, "lr": 1e-2}
    if is_started:
        first = learner(tiny_model_dir, **changes)
        first.step(mixed(9), step=1)
        first.save_hf(tmp_path / "start")
        changes |= {"start_adapter": str(tmp_path / "start"), "lora": LoraSettings()}
    settings = learner_settings(tiny_model_dir, gradient_checkpointing=True, **changes)
    folder, one = tmp_path / "checkpoints", Learner(settings, total_steps=None)
    expected = Learner(settings, total_steps=None)
    for each in (one, expected):
        steps(each, [0])
    saved = save(folder, 1, one)
    job = partial(go_on_and_save, folder, [2, 4], 2)
    loaded, by_two, saved_by_two = start_team(2, settings, job, tmp_path / "team").result()
    assert_same_bits(loaded.weights, saved.weights)
    curve = steps(expected, [2, 4], 2)
    assert_same_curve(by_two, curve)
    assert curve.metrics[-1]["actor/kl_loss"] > 1e-6
    again = Learner(settings, total_steps=None)
    loaded, *_ = go_on_and_save(folder, [], 4, again)
    assert_same_bits(loaded.weights, saved_by_two.weights)
    assert_same_bits(again.state_dict(is_base=True), one.state_dict(is_base=True))
    assert [p.name for p in (folder / "base_model").glob("global_step_*")] == ["global_step_0"]


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
