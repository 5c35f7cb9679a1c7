"""An adapter on two gloo ranks: the curve of one, and checkpoints for any number."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_jobs import Kept, steps, steps_from
from rank_team import start_team
from tiny_learner import learner, learner_settings, mixed

from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import FunctionSettings, LoraSettings

KL = FunctionSettings("k2", {"kl_coef": 0.5})


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


def assert_same_curve(found: Kept, expected: Kept) -> None:
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        for name in one.keys() - {"time/train_s", "perf/tokens_per_s"}:
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), name
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_started", [False, True], ids=["new", "with a start"])
def test_two_ranks_train_an_adapter_as_one_does_and_go_on_from_its_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, is_started: bool
) -> None:
    """KL to the model below, or to the start; activations computed again; one rank, then two."""
    changes = {"lora": LoraSettings(rank=4, alpha=8), "kl_loss_fn": KL, "lr": 1e-2}
    if is_started:
        first = learner(tiny_model_dir, **changes)
        first.step(mixed(9), step=1)
        first.save_hf(tmp_path / "start")
        changes |= {"start_adapter": str(tmp_path / "start"), "lora": LoraSettings()}
    settings = learner_settings(tiny_model_dir, gradient_checkpointing=True, **changes)
    one = Learner(settings, total_steps=None)
    before = one.state_dict(is_base=True)
    begun = steps(one, [0, 1])
    team = start_team(2, settings, partial(steps_from, begun, [3, 4], 3), tmp_path)
    expected = steps(one, [3, 4], 3)
    loaded, by_two = team.result()
    assert all(torch.equal(loaded.weights[n], t) for n, t in begun.weights.items())
    assert_same_curve(by_two, expected)
    assert expected.metrics[-1]["actor/kl_loss"] > 1e-6
    again, _ = steps_from(copy.deepcopy(by_two), [], 5, Learner(settings, total_steps=None))
    assert all(torch.equal(again.weights[n], t) for n, t in by_two.weights.items())
    assert all(torch.equal(t, one.state_dict(is_base=True)[n]) for n, t in before.items())
