"""Weights and rejections of veRL's rollout_correction, beside NumPy written from its formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from loss_cases import CENTRED, NOW, algorithm, whole_loss, worked

from streamrft.consumers.algorithms.build import Algorithm
from streamrft.consumers.algorithms.correction import Corrected, RolloutCorrection
from streamrft.consumers.learning.preparation import corrected, with_measured
from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError

NO_KL = FunctionSettings("none")
LN2 = float(np.log(2))
# log r of the worked batch's trained tokens: ratios 2, 1/2 | 3/2 | 1, 1/4
RATIOS = [np.array([LN2, -LN2]), np.array([np.log(1.5)]), np.array([0.0, -2 * LN2])]


def correction(**args: Any) -> RolloutCorrection:
    return RolloutCorrection.create(args)


def weights(outcome: Corrected) -> list[float]:
    return np.concatenate(outcome.weights).tolist()


def kept(outcome: Corrected) -> list[bool]:
    return np.concatenate(outcome.kept).tolist()


def test_token_weights_are_cut_above_the_threshold_only():
    outcome = correction(rollout_is="token", rollout_is_threshold=1.2)(RATIOS)
    assert weights(outcome) == pytest.approx([1.2, 0.5, 1.2, 1.0, 0.25])
    assert kept(outcome) == [True] * 5
    assert outcome.metrics == {
        "rollout_corr/rollout_is_mean": pytest.approx(4.15 / 5),
        "rollout_corr/rollout_is_max": pytest.approx(2.0),
        "rollout_corr/rollout_is_truncated_fraction": pytest.approx(0.4),
    }


def test_a_sequences_weight_is_the_product_of_its_tokens_ratios():
    outcome = correction(rollout_is="sequence", rollout_is_threshold=1.2)(RATIOS)
    assert weights(outcome) == pytest.approx([1.0, 1.0, 1.2, 0.25, 0.25])


def test_two_bounds_make_what_is_outside_zero():
    outcome = correction(rollout_is="token", rollout_is_threshold="0.4_1.6")(RATIOS)
    assert weights(outcome) == pytest.approx([0.0, 0.5, 1.5, 1.0, 0.0])


def test_normalised_weights_have_mean_one():
    by_token = correction(rollout_is="token", rollout_is_batch_normalize=True)(RATIOS)
    assert weights(by_token) == pytest.approx(np.array([2, 0.5, 1.5, 1, 0.25]) / (5.25 / 5))
    by_sequence = correction(rollout_is_batch_normalize=True)(RATIOS)
    expected = np.array([1, 1, 1.5, 0.25, 0.25]) / (2.75 / 3)
    assert weights(by_sequence) == pytest.approx(expected)


K2 = [LN2**2 / 2, LN2**2 / 2, np.log(1.5) ** 2 / 2, 0.0, 2 * LN2**2]
K3 = [1 - LN2, LN2 - 0.5, 0.5 - np.log(1.5), 0.0, 2 * LN2 - 0.75]


@pytest.mark.parametrize(
    "name, threshold, expected",
    [
        ("token_k1", "0.4_1.6", [False, True, True, True, False]),
        ("token_k1", 2.0001, [True, True, True, True, False]),
        ("token_k2", 0.3, [k <= 0.3 for k in K2]),
        ("token_k3", 0.3, [k <= 0.3 for k in K3]),
        ("seq_sum_k1", "0.9_1.1", [True, True, False, False, False]),
        ("seq_mean_k1", "0.5_1.1", [True, True, False, True, True]),
        ("seq_sum_k2", 0.3, [False, False, True, False, False]),
        ("seq_mean_k2", 0.3, [True, True, True, False, False]),
        ("seq_max_k2", 0.3, [True, True, True, False, False]),
        ("seq_sum_k3", 0.55, [True, True, True, False, False]),
        ("seq_mean_k3", 0.3, [True, True, True, False, False]),
        ("seq_max_k3", 0.3, [False, False, True, False, False]),
        ("token_k2,seq_mean_k1", "0.3,0.9_1.1", [True, True, False, False, False]),
    ],
)
def test_what_is_outside_is_not_trained(name: str, threshold: Any, expected: list[bool]):
    outcome = correction(rollout_is=None, rollout_rs=name, rollout_rs_threshold=threshold)(RATIOS)
    assert kept(outcome) == expected
    assert weights(outcome) == [1.0] * 5
    share = 1 - np.mean(expected)
    assert outcome.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)


def test_the_share_of_touched_sequences_is_counted():
    outcome = correction(rollout_is=None, rollout_rs="token_k2", rollout_rs_threshold=0.3)(RATIOS)
    metrics = outcome.metrics
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "args, match",
    [
        ({"rollout_iss": "token"}, "'rollout_iss' is unknown. Did you mean 'rollout_is'"),
        ({"rollout_is": "turn"}, "rollout_is: 'turn' found; allowed are null, token, sequence"),
        ({"rollout_is_threshold": 0}, "must be above 0"),
        ({"rollout_is_threshold": "much"}, "'much' found; a number above 0"),
        ({"rollout_is_threshold": "2_1"}, "low first"),
        ({"rollout_rs": "geometric"}, "rollout_rs: 'geometric' found"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: null; token_k1 needs it"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"},
            "2 thresholds for 1 names",
        ),
        ({"bypass_mode": True}, "'sequence' does nothing while old log-probs are the engine's"),
        ({"loss_type": "reinforce"}, "needs bypass_mode: true"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        correction(**args)


def test_an_experts_rows_are_neither_corrected_nor_counted():
    """Own weights are those without the expert; a range that 1 is not in leaves its row alone."""
    args = {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.1_9"}
    rule = correction(rollout_is="token", rollout_is_batch_normalize=True, **args)
    *own, last = measured()
    expert = dataclasses.replace(last, is_expert=True)
    alone, metrics = corrected(own, rule)
    first, expert_first, second = corrected([own[0], expert, own[1]], rule)[0]
    for one, other in zip((first, second), alone, strict=True):
        for s, t in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(s.correction, t.correction)
            np.testing.assert_array_equal(s.loss_mask, t.loss_mask)
    assert corrected([*own, expert], rule)[1] == metrics
    (row,), (given,) = expert_first.sequences, expert.sequences
    assert (row.correction == 1).all() and (row.loss_mask == given.loss_mask).all()


def test_a_batch_without_trained_tokens_is_corrected_to_itself():
    args = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0}
    outcome = correction(**args, rollout_is_batch_normalize=True)([np.zeros(0), np.zeros(0)])
    assert [len(w) for w in outcome.weights] == [0, 0] and outcome.metrics == {}


def measured() -> list:
    """The worked batch with the log-probs of now as those of the policy before the step."""
    trained = np.log(np.array([1.0, 0.25, 0.75, 0.5, 0.125], np.float32))
    return with_measured(worked(), {"current_logprobs": trained})


def decoupled(**args: Any) -> Algorithm:
    return algorithm(
        advantage_fn=CENTRED,
        kl_loss_fn=NO_KL,
        bypass_old_logprobs=False,
        rollout_correction=args or None,
    )


def test_recomputed_old_logprobs_make_every_ratio_one():
    """Then the loss is -A: -2, -2 | 1 | 1, 1, and nothing is clipped; the gap remains visible."""
    chosen = decoupled()
    assert chosen.recomputes_old and chosen.measures == {"current_logprobs"}
    loss, metrics = whole_loss(chosen, measured())
    assert loss == pytest.approx(-1 / 5, abs=1e-6)
    assert metrics["mean/pg_clipfrac"] == 0.0
    assert metrics["mean/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mean/logprob_gap_mean"] == pytest.approx(4 * LN2 + np.log(1.5), abs=1e-5)
    assert metrics["max/logprob_gap_max"] == pytest.approx(2 * LN2, abs=1e-6)
    assert metrics["mean/logprob_gap_kl"] == pytest.approx(2 * LN2 - np.log(1.5), abs=1e-5)
    assert metrics["mean/logprob_gap_k3"] == pytest.approx(sum(K3), abs=1e-5)


def test_decoupled_ppo_weighs_the_loss_by_the_truncated_ratio_to_the_behaviour():
    """Weights 1.2, 1/2 | 1.2 | 1, 1/4: -2 (1.7) + 1.2 + 1.25."""
    chosen = decoupled(rollout_is="token", rollout_is_threshold=1.2)
    assert chosen.correction is not None
    examples, metrics = corrected(measured(), chosen.correction)
    loss, _ = whole_loss(chosen, examples)
    assert loss == pytest.approx((-3.4 + 1.2 + 1.25) / 5, abs=1e-6)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)


def test_rejected_tokens_are_gone_from_loss_and_average():
    """Only ratio 1/4 has r - 1 - log r above 0.31: -2 - 2 | 1 | 1 over four tokens."""
    chosen = decoupled(rollout_is=None, rollout_rs="token_k3", rollout_rs_threshold=0.31)
    assert chosen.correction is not None
    examples, _ = corrected(measured(), chosen.correction)
    masks = [e.sequences[0].loss_mask.tolist() for e in examples]
    assert masks == [[0, 1, 1], [0, 1], [0, 0, 1, 0, 0]]
    assert whole_loss(chosen, examples)[0] == pytest.approx((-4 + 1 + 1) / 4, abs=1e-6)


def test_a_bypassing_correction_keeps_the_recorded_ratio():
    chosen = algorithm(
        advantage_fn=CENTRED,
        kl_loss_fn=NO_KL,
        rollout_correction={
            "bypass_mode": True,
            "rollout_is": None,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.9_1.1",
        },
    )
    assert not chosen.recomputes_old and chosen.correction is not None
    examples, _ = corrected(measured(), chosen.correction)
    assert whole_loss(chosen, examples)[0] == pytest.approx((-2.4 - 1) / 2, abs=1e-6)


def test_reinforce_is_the_log_prob_under_the_weights():
    """-A w logp: w 2, 1/2 | 3/2 | 1, 1/4 and logp 0, -2 ln 2 | ln 3/4 | -ln 2, -3 ln 2."""
    chosen = algorithm(
        advantage_fn=CENTRED,
        kl_loss_fn=NO_KL,
        rollout_correction={"bypass_mode": True, "rollout_is": "token", "loss_type": "reinforce"},
    )
    assert chosen.correction is not None
    examples, _ = corrected(measured(), chosen.correction)
    expected = (2 * LN2 + 1.5 * np.log(0.75) - LN2 - 0.75 * LN2) / 5
    assert whole_loss(chosen, examples, NOW)[0] == pytest.approx(expected, abs=1e-6)


def test_the_configurations_bypass_decides_unless_the_correction_says_otherwise():
    none = {"rollout_is": None}
    for bypass, given, recomputes in (
        (True, none, False),
        (False, none, True),
        (True, {**none, "bypass_mode": False}, True),
    ):
        chosen = algorithm(bypass_old_logprobs=bypass, rollout_correction=given)
        assert chosen.recomputes_old == recomputes
    assert not algorithm().recomputes_old and algorithm().measures == frozenset()


def test_weights_do_not_touch_the_kl_to_the_reference():
    kl = FunctionSettings("k2", {"kl_coef": 0.5})
    plain = dataclasses.replace(decoupled(), kl=algorithm(kl_loss_fn=kl).kl)
    weighed = dataclasses.replace(
        decoupled(rollout_is="token", rollout_is_threshold=1.2), kl=plain.kl
    )
    assert weighed.correction is not None
    examples, _ = corrected(measured(), weighed.correction)
    reference = ([0.3] * 3, [0.3] * 2, [0.3] * 5)
    before = whole_loss(plain, measured(), reference=reference)[1]
    after = whole_loss(weighed, examples, reference=reference)[1]
    assert after["loss/kl_loss"] == pytest.approx(before["loss/kl_loss"]) and after[
        "loss/pg_loss"
    ] != pytest.approx(before["loss/pg_loss"])
