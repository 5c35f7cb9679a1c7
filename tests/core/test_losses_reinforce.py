"""Losses without a clip of the ratio: REINFORCE, TOPR, OPMD, REC, beside NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
from loss_cases import (
    agrees_with_autograd,
    arrays,
    centred,
    is_factor_of_logprobs,
    policy_loss,
    sequence_means,
    tokens,
    whole_loss,
    worked,
)

from streamrft.schemas.errors import ConfigError


@pytest.mark.parametrize(
    "name, expected",
    [
        # log-probs 0, -2 ln 2 | ln 3/4 | -ln 2, -3 ln 2 under 2 | -1 | -1
        ("reinforce", (2 * 2 * 0.6931472 - 0.2876821 - 0.6931472 - 3 * 0.6931472) / 5),
        # half of that: tau is 1
        ("opmd", (2 * 2 * 0.6931472 - 0.2876821 - 0.6931472 - 3 * 0.6931472) / 10),
        # bad tokens under their ratio 3/2, 1, 1/4, at most 1
        ("topr", (2 * 2 * 0.6931472 - 0.2876821 - 0.6931472 - 0.75 * 0.6931472) / 5),
        # ratios 2, 1/2 | 3/2 | 1, 1/4
        ("importance_sampling", (-4 - 1 + 1.5 + 1 + 0.25) / 5),
        # no range and no weight
        ("rec", (2 * 2 * 0.6931472 - 0.2876821 - 0.6931472 - 3 * 0.6931472) / 5),
    ],
)
def test_the_family_by_hand(name: str, expected: float):
    assert whole_loss(centred(name), worked())[0] == pytest.approx(expected, abs=1e-6)


def test_topr_tapers_only_what_is_not_above_the_threshold():
    t = tokens()
    logprobs, old, a = arrays(t)
    weight = np.where(a > 0.2, 1.0, np.clip(np.exp(logprobs - old), 0, 1))
    loss = policy_loss("topr", advantage_threshold=0.2)
    assert is_factor_of_logprobs(-weight * a, loss, t)


def test_opmd_divides_by_one_plus_tau():
    t = tokens()
    logprobs, _, a = arrays(t)
    loss = policy_loss("opmd", tau=3.0)
    np.testing.assert_allclose(loss(t).losses.detach(), -a * logprobs / 4, rtol=1e-12)
    assert agrees_with_autograd(loss, t)


@pytest.mark.parametrize("name", ["reinforce", "importance_sampling"])
def test_plain_gradients_agree_with_autograd(name: str):
    t = tokens()
    logprobs, old, a = arrays(t)
    expected = -a * (np.exp(logprobs - old) if name == "importance_sampling" else logprobs)
    np.testing.assert_allclose(policy_loss(name)(t).losses.detach(), expected, rtol=1e-12)
    assert agrees_with_autograd(policy_loss(name), t)


def reference_range(mode: str, ratio: np.ndarray, mean: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Which tokens count, token by token as the paper's cases."""
    counts = np.zeros(len(a), bool)
    for i, (r, s, advantage) in enumerate(zip(ratio, mean, a, strict=True)):
        r = s if mode == "gspo-one-side" else r
        if mode == "none":
            counts[i] = True
        elif mode == "two-side":
            counts[i] = 0.8 <= r <= 1.2
        elif mode == "ring":
            far = r <= 0.4 if advantage >= 0 else r >= 3
            counts[i] = 0.8 <= r <= 1.2 or far
        else:
            counts[i] = r <= 1.2 if advantage >= 0 else r >= 0.8
    return counts


@pytest.mark.parametrize("mode", ["none", "one-side", "two-side", "ring", "gspo-one-side"])
@pytest.mark.parametrize(
    "weight",
    [
        "none",
        "importance_sampling",
        "truncated_importance_sampling",
        "gspo_importance_sampling",
        "advantage",
    ],
)
def test_rec_takes_every_range_with_every_weight(mode: str, weight: str):
    t = tokens()
    logprobs, old, a = arrays(t)
    ratio = np.exp(logprobs - old)
    mean = np.exp(sequence_means(t, logprobs - old))
    weights = {
        "none": np.ones(len(a)),
        "importance_sampling": ratio,
        "truncated_importance_sampling": np.clip(ratio, 0.4, 3.0),
        "gspo_importance_sampling": mean,
        "advantage": np.exp(a / 2.0),
    }[weight]
    counts = reference_range(mode, ratio, mean, a)
    assert counts.all() == (mode == "none")
    loss = policy_loss("rec", clip_mode=mode, weight=weight, temp=2.0)
    assert is_factor_of_logprobs(-a * weights * counts, loss, t)


def test_recs_regularisers_reach_tokens_out_of_range_too():
    t = tokens()
    logprobs, old, a = arrays(t)
    plain = policy_loss("rec", clip_mode="two-side")(t).losses.detach().numpy()
    k2 = policy_loss("rec", clip_mode="two-side", regularizer="k2", regularizer_coef=0.3)
    np.testing.assert_allclose(k2(t).losses.detach(), plain + 0.3 * (logprobs - old) ** 2)
    forward = policy_loss("rec", regularizer="forward-kl", regularizer_coef=0.3)
    np.testing.assert_allclose(forward(t).losses.detach(), -(a + 0.3) * logprobs)
    assert not k2.is_zero_without_advantage and policy_loss("rec").is_zero_without_advantage
    unclipped = policy_loss("rec", regularizer="k2", regularizer_coef=0.3)
    assert agrees_with_autograd(unclipped, t) and agrees_with_autograd(forward, t)


def test_rec_can_turn_a_teachers_advantage_to_the_policy_of_now():
    t = tokens()
    logprobs, old, a = arrays(t)
    loss = policy_loss("rec", fix_opd_advantage=True)
    np.testing.assert_allclose(loss(t).losses.detach(), -(a + old - logprobs) * logprobs)


def test_rec_averages_by_sequences_where_its_range_is_theirs():
    assert policy_loss("rec").loss_agg_mode == "token-mean"
    assert policy_loss("rec", clip_mode="gspo-one-side").loss_agg_mode == "seq-mean-token-mean"


def test_rec_has_trinitys_defaults():
    loss = policy_loss("rec")
    assert (loss.epsilon_low, loss.epsilon_high) == (0.2, 0.2)
    assert (loss.epsilon_low_prime, loss.epsilon_high_prime) == (0.6, 2.0)
    assert (loss.clip_mode, loss.weight, loss.regularizer) == ("none", "none", "none")
    assert (loss.temp, loss.regularizer_coef) == (1.0, 0.0)


@pytest.mark.parametrize(
    "args, match",
    [
        ({"clip_mode": "both"}, "clip_mode 'both' is none of none, one-side"),
        ({"epsilon_low": 0.0}, "epsilon_low 0.0 must be above 0 and not above 1"),
        ({"temp": 0.0}, "temp 0.0 must be above 0"),
    ],
)
def test_rec_refuses_impossible_arguments(args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        policy_loss("rec", **args)
