"""Imitation, alone and mixed with the policy's own rollouts, beside NumPy float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from loss_cases import (
    CENTRED,
    NO_KL,
    NOW,
    THEN,
    agrees_with_autograd,
    algorithm,
    arrays,
    centred,
    gradient,
    is_factor_of_logprobs,
    policy_loss,
    tokens,
    whole_loss,
    worked,
)

from streamrft.consumers.algorithms.build import Algorithm
from streamrft.consumers.learning.objective import MicroTerms, micro_loss
from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError

LN2 = float(np.log(2))


@pytest.mark.parametrize(
    "name, expected",
    [
        # probabilities 1, 1/4 | 3/4 | 1/2, 1/8: -ln is 0, 2 ln 2 | 0.2877 | ln 2, 3 ln 2
        ("sft", (6 * 0.6931472 + 0.2876821) / 5),
        ("sft_is", (2 / 4 * LN2 + 0.75 * 0.2876821 + LN2 / 2 + 3 / 8 * LN2) / 5),
        ("sft_phi", (3 / 16 * 2 * LN2 + 3 / 16 * 0.2876821 + LN2 / 4 + 7 / 64 * 3 * LN2) / 5),
    ],
)
def test_the_family_by_hand(name: str, expected: float):
    chosen = algorithm("raft", policy_loss_fn=FunctionSettings(name))
    assert whole_loss(chosen, worked())[0] == pytest.approx(expected, abs=1e-6)


def test_weights_of_imitation_carry_no_gradient():
    t = tokens()
    logprobs, _, _ = arrays(t)
    p = np.exp(logprobs)
    for name, weight in (("sft", np.ones(len(p))), ("sft_is", p), ("sft_phi", p * (1 - p))):
        loss = policy_loss(name)
        assert is_factor_of_logprobs(-weight, loss, t)
        assert not loss.is_zero_without_advantage
    assert agrees_with_autograd(policy_loss("sft"), t)


def test_sft_phi_leaves_out_what_the_policy_knows_already():
    t = tokens()
    logprobs, _, _ = arrays(t)
    is_known = np.exp(logprobs) > 0.7
    assert is_known.any()
    moved = gradient(policy_loss("sft_phi", cutoff_prob=0.7), t)
    assert (moved[is_known] == 0).all() and (moved[~is_known] != 0).all()


def with_expert(index: int = 2) -> list:
    examples = worked()
    examples[index] = dataclasses.replace(examples[index], is_expert=True)
    return examples


def mixed(name: str, **args: object) -> Algorithm:
    return centred(name, name, **args)


def test_mix_by_hand_takes_two_means_apart():
    """Own tokens -2.4, -1 | 1.5 have a mean of -1.9 / 3; the expert's ln 2, 3 ln 2 one of 2 ln 2.

    One mean over all five would give (0.75 (-1.9) + 0.25 (4 ln 2)) / 5 instead.
    """
    loss, metrics = whole_loss(mixed("mix", mu=0.25), with_expert())
    assert loss == pytest.approx(0.75 * -1.9 / 3 + 0.25 * 2 * 0.6931472, abs=1e-6)
    assert metrics["mean/mu"] == pytest.approx(3 * 0.25)
    assert metrics["mean/pg_clipfrac"] == 1.0


def test_the_kl_beside_an_expert_is_one_mean_over_all_tokens():
    """d is ln 2, -ln 2 | ln 1.5 | 0, -2 ln 2; own and expert's means would add up instead."""
    kl = FunctionSettings("k1", {"kl_coef": 0.1})
    chosen = algorithm("mix", advantage_fn=CENTRED, kl_loss_fn=kl)
    metrics = whole_loss(chosen, with_expert(), reference=THEN)[1]
    assert metrics["loss/kl_loss"] == pytest.approx((np.log(1.5) - 2 * LN2) / 5, abs=1e-6)


def test_chord_by_hand_weighs_the_experts_tokens_by_p_times_one_minus_p():
    """Of the expert ln 2 / 4 and 7 / 64 3 ln 2."""
    loss, _ = whole_loss(mixed("mix_chord", mu_valley=0.25), with_expert())
    expert = (0.25 + 21 / 64) / 2 * 0.6931472
    assert loss == pytest.approx(0.75 * -1.9 / 3 + 0.25 * expert, abs=1e-6)
    loss, _ = whole_loss(
        mixed("mix_chord", mu_valley=0.25, enable_phi_function=False), with_expert()
    )
    assert loss == pytest.approx(0.75 * -1.9 / 3 + 0.25 * 2 * 0.6931472, abs=1e-6)


@pytest.mark.parametrize(
    "step, mu",
    [(1, 0.09), (9, 0.81), (10, 0.9), (60, 0.5), (35, 0.7828427), (110, 0.1), (999, 0.1)],
)
def test_mu_warms_up_and_falls_as_a_cosine(step: int, mu: float):
    """Linear to 0.9 at step 10, half way down after 50 of 100 steps, cos(pi / 4) after 25."""
    loss = policy_loss(
        "mix_chord", mu_warmup_steps=10, mu_decay_steps=100, mu_peak=0.9, mu_valley=0.1
    )
    assert loss.mu(step) == pytest.approx(mu, abs=1e-6)


def test_mu_of_the_step_reaches_the_loss():
    chosen = mixed("mix_chord", mu_warmup_steps=2, mu_peak=0.5, mu_valley=0.0)
    assert whole_loss(chosen, with_expert(), step=1)[1]["mean/mu"] == pytest.approx(3 * 0.25)
    assert whole_loss(chosen, with_expert(), step=2)[1]["mean/mu"] == 0.0


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_without_an_expert_a_mixed_loss_is_ppo_under_one_minus_mu(name: str):
    chosen = algorithm("grpo", advantage_fn=CENTRED, kl_loss_fn=NO_KL)
    plain = whole_loss(chosen, worked())[0]
    assert whole_loss(mixed(name), worked())[0] == pytest.approx(0.9 * plain, abs=1e-7)


def test_mix_gradients_agree_with_autograd_and_numpy():
    is_expert = torch.arange(64) % 3 == 0
    t = tokens(is_expert=is_expert)
    logprobs, old, a = arrays(t)
    ratio = np.exp(logprobs - old)
    surrogate = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2))
    own = np.where(a < 0, np.minimum(surrogate, -3 * a), surrogate)
    expected = np.where(is_expert.numpy(), -0.2 * logprobs, 0.8 * own)
    loss = policy_loss("mix", mu=0.2)
    np.testing.assert_allclose(loss(t).losses.detach(), expected, rtol=1e-12)
    assert agrees_with_autograd(loss, t)


def test_the_entropy_of_mix_is_that_of_own_tokens():
    is_expert = torch.arange(64) % 2 == 0
    t = tokens(is_expert=is_expert)
    for name, share in (("mix", 0.5), ("default", 1.0)):
        chosen = algorithm(
            "mix", entropy_loss_fn=FunctionSettings(name, {"entropy_coef": 0.1}), kl_loss_fn=NO_KL
        )
        weights = torch.full((64,), 1 / 64, dtype=torch.float64)
        terms = MicroTerms(weights, t.old_logprobs, entropies=torch.ones(64, dtype=torch.float64))
        metrics = micro_loss(chosen, t, terms)[1]
        assert metrics["loss/entropy_loss"].item() == pytest.approx(share)


@pytest.mark.parametrize(
    "name, args, match",
    [
        ("mix", {"mu": 1.5}, r"mu 1.5 must lie in \[0, 1\]"),
        ("mix_chord", {"mu_peak": -1.0}, "mu_peak -1.0"),
        ("sft_phi", {"cutoff_prob": 0.0}, "cutoff_prob 0.0 must be above 0"),
    ],
)
def test_impossible_arguments_are_refused(name: str, args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        policy_loss(name, **args)


def test_what_stands_at_a_masked_token_changes_no_loss():
    chosen = algorithm("raft")
    other = ([0.9, 1.0, 0.25], [0.9, 0.75], [0.9, 0.9, 0.5, 0.7, 0.125])
    assert whole_loss(chosen, worked(), other)[0] == whole_loss(chosen, worked(), NOW)[0]
