"""Losses that bound the importance ratio: PPO, GSPO, CISPO, SAPO, sPPO, beside NumPy float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from loss_cases import (
    agrees_with_autograd,
    algorithm,
    arrays,
    centred,
    differences,
    gradient,
    is_factor_of_logprobs,
    policy_loss,
    sequence_means,
    tokens,
    whole_loss,
    worked,
)

from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError


def loss_of_the_worked_batch(name: str, mode: str | None = None, **args: float) -> float:
    return whole_loss(centred(name, mode=mode, **args), worked(), max_tokens=10)[0]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", -0.1 / 5),
        ("seq-mean-token-sum", -0.1 / 3),
        ("seq-mean-token-mean", (-1.7 + 1.5 + 0.9) / 3),
        ("seq-mean-token-sum-norm", -0.1 / 30),
    ],
)
def test_ppo_by_hand_in_every_averaging(mode: str, expected: float):
    """Ratios 2, 1/2 | 3/2 | 1, 1/4 under 2 | -1 | -1: -2.4 - 1 | 1.5 | 1 + 0.8."""
    assert loss_of_the_worked_batch("ppo", mode) == pytest.approx(expected, abs=1e-6)


def test_gspo_by_hand():
    """exp of the mean log-ratio: 1 | 3/2 | 1/2. Losses -2 | max(1.5, 1.2) | max(0.5, 0.8)."""
    value = loss_of_the_worked_batch("gspo", clip_range_low=0.2, clip_range_high=0.2)
    assert value == pytest.approx((-2 + 1.5 + 0.8) / 3, abs=1e-6)


def test_cispo_by_hand():
    """Weights 1.28, 1/2 | 1.28 | 1, 1/4 times log-probs ln 1, ln 1/4 | ln 3/4 | ln 1/2, ln 1/8."""
    expected = (0 + 1.3862944 - 0.3682330 - 0.6931472 - 0.5198604) / 5
    assert loss_of_the_worked_batch("cispo") == pytest.approx(expected, abs=1e-6)


def test_sapo_by_hand():
    """4 sigmoid(r - 1) at r 2, 1/2 | 3/2 | 1, 1/4 with both temperatures 1."""
    expected = (-2 * (2.9242343 + 1.5101627) + 2.4898373 + 2.0 + 1.2832851) / 5
    value = loss_of_the_worked_batch("sapo", tau_neg=1.0)
    assert value == pytest.approx(expected, abs=1e-6)


def test_sppo_by_hand():
    """With epsilon 1 ratios of 1/2 to 2 count: -2 ln 2 and -2 ln 1/2 cancel; ln 3/2; ln 1."""
    expected = (-2 * np.log(2) + 2 * np.log(2) + 0.4054651) / 5
    assert loss_of_the_worked_batch("sppo", epsilon=1.0001) == pytest.approx(expected, abs=1e-6)


def reference_gspo(logprobs: np.ndarray, t, low: float, high: float) -> float:
    """Mean over sequences of the paper's objective, negated."""
    total = 0.0
    for s in range(t.num_sequences):
        chosen = t.sequence.numpy() == s
        ratio = np.exp(np.mean(logprobs[chosen] - t.old_logprobs.numpy()[chosen]))
        a = t.advantages.numpy()[chosen][0]
        total -= min(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return total / t.num_sequences


def one_advantage_a_sequence(t):
    return dataclasses.replace(t, advantages=torch.tensor([-1.0, 2.0, -0.5, 0.3, -2.0])[t.sequence])


def test_gspo_is_the_papers_objective_and_its_tokens_share_its_gradient():
    t = one_advantage_a_sequence(tokens(spread=0.3))
    loss = policy_loss("gspo", clip_range_low=0.02, clip_range_high=0.02)
    counts = np.bincount(t.sequence.numpy())
    weights = (1 / counts / len(counts))[t.sequence.numpy()]
    logprobs, old, a = arrays(t)
    ratios = np.exp(sequence_means(t, logprobs - old))
    is_clipped = np.where(a > 0, ratios > 1.02, ratios < 0.98)
    assert 0 < is_clipped.sum() < len(a)
    result = loss(t)
    assert (result.losses.detach().numpy() * weights).sum() == pytest.approx(
        reference_gspo(logprobs, t, 0.02, 0.02)
    )
    expected = differences(lambda x: reference_gspo(x, t, 0.02, 0.02), logprobs)
    moved = t.logprobs.detach().clone().requires_grad_()
    made = loss(dataclasses.replace(t, logprobs=moved)).losses
    (made * torch.tensor(weights)).sum().backward()
    assert moved.grad is not None
    np.testing.assert_allclose(moved.grad, expected, atol=1e-8)
    np.testing.assert_array_equal(result.metrics["pg_clipfrac"].numpy() == 1, is_clipped)


def test_gspo_has_trinitys_defaults():
    loss = policy_loss("gspo")
    assert (loss.clip_range_low, loss.clip_range_high) == (3e-4, 4e-4)
    assert algorithm("gspo").aggregation.__name__ == "seq_mean_token_mean"
    chosen = algorithm("grpo", policy_loss_fn=FunctionSettings("gspo"))
    assert chosen.aggregation.__name__ == "seq_mean_token_mean"


@pytest.mark.parametrize("masks", [False, True])
def test_cispo_is_the_papers(masks: bool):
    t = tokens()
    logprobs, old, a = arrays(t)
    ratio = np.exp(logprobs - old)
    weight = np.clip(ratio, 0, 1.28)
    if masks:
        weight = weight * ~(((ratio > 1.28) & (a > 0)) | ((ratio < 0.4) & (a < 0)))
    loss = policy_loss("cispo", enable_mask_clip=masks, mask_clip_range_low=0.6)
    assert is_factor_of_logprobs(-weight * a, loss, t)


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_would_lose():
    t = tokens()
    logprobs, old, a = arrays(t)
    is_lost = (np.exp(logprobs - old) > 1.28) & (a > 0)
    assert is_lost.any()
    assert (gradient(policy_loss("ppo"), t)[is_lost] == 0).all()
    assert (gradient(policy_loss("cispo"), t)[is_lost] != 0).all()


def test_sapo_is_the_papers_soft_gate():
    t = tokens(spread=0.7)
    logprobs, old, a = arrays(t)
    tau = np.where(a > 0, 1.0, 1.05)
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(logprobs - old) - 1)))
    loss = policy_loss("sapo")
    np.testing.assert_allclose(loss(t).losses.detach(), -a * gate, rtol=1e-7)
    assert agrees_with_autograd(loss, t)


def test_sapo_is_the_policy_gradient_on_policy():
    """4 s (1 - s) r is 1 at r = 1; the gate times log-prob, as elsewhere, would give 2."""
    t = tokens(spread=0.0)
    np.testing.assert_allclose(gradient(policy_loss("sapo"), t), -t.advantages, rtol=1e-7)


def test_sppo_counts_the_log_ratio_in_its_range_only():
    t = tokens(spread=0.3)
    logprobs, old, a = arrays(t)
    is_in = np.abs(logprobs - old) <= np.log(1.3)
    assert 0 < is_in.sum() < len(a)
    loss = policy_loss("sppo")
    np.testing.assert_allclose(loss(t).losses.detach(), -a * (logprobs - old) * is_in)
    np.testing.assert_allclose(gradient(loss, t), -a * is_in)
    np.testing.assert_array_equal(loss(t).metrics["pg_clipfrac"].numpy() == 1, ~is_in)
    assert agrees_with_autograd(loss, t)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "importance_sampling"])
def test_a_huge_ratio_stays_finite(name: str):
    t = tokens()
    far = dataclasses.replace(t, old_logprobs=t.old_logprobs - 1e4)
    loss = policy_loss(name)
    assert torch.isfinite(loss(far).losses).all()
    assert np.isfinite(gradient(loss, far)).all()


WITHOUT_A_BOUND = ["reinforce", "importance_sampling", "topr", "opmd", "rec"]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "sppo", *WITHOUT_A_BOUND])
def test_tokens_without_advantage_have_no_loss_and_no_gradient(name: str):
    t = tokens()
    idle = dataclasses.replace(t, advantages=torch.zeros_like(t.advantages))
    loss = policy_loss(name)
    assert loss.is_zero_without_advantage
    assert (loss(idle).losses == 0).all() and (gradient(loss, idle) == 0).all()


@pytest.mark.parametrize(
    "name, args, match",
    [
        ("gspo", {"clip_range_low": -0.1}, "clip range"),
        ("sapo", {"tau_neg": 0.5}, "tau_pos 1.0 must be above 0 and not above tau_neg 0.5"),
        ("sppo", {"epsilon": -1.0}, "epsilon -1.0 must not be below 0"),
        ("cispo", {"clip_ratio": 1.0}, "'clip_ratio' is unknown"),
    ],
)
def test_impossible_arguments_are_refused(name: str, args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        policy_loss(name, **args)
