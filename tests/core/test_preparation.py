"""What happens to a batch before its advantages."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from loss_cases import CENTRED, LN2, algorithm, whole_loss, worked

from streamrft.consumers.algorithms.advantages import token_rewards
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.objective import batch_metrics, length_bias, prepare
from streamrft.consumers.learning.preparation import penalised, refilled, usable, with_measured
from streamrft.consumers.settings import FunctionSettings

NO_KL = FunctionSettings("none")


def rewarded(*rewards: float) -> list[TrainingExample]:
    return worked(rewards=(rewards[0], rewards[1], rewards[2]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_leaves_its_siblings_a_group_of_two(bad: float):
    """1, NaN, 0: the others are compared as 1 and 0."""
    first, last = usable(rewarded(1.0, bad, 0.0))
    assert first.group_rewards == last.group_rewards == (1.0, 0.0)
    assert (first.group_slot_index, last.group_slot_index) == (0, 1)
    chosen = algorithm(advantage_fn=CENTRED, kl_loss_fn=NO_KL)
    assert chosen.advantage is not None and chosen.advantage([first, last]) == [0.5, -0.5]


def test_one_left_alone_by_bad_siblings_is_a_group_of_one():
    (only,) = usable(rewarded(math.nan, 0.5, math.nan))
    assert only.group_rewards == (0.5,) and only.group_slot_index == 0


def test_a_bad_reward_of_a_filtered_sibling_does_not_count():
    examples = usable(rewarded(1.0, 0.0, math.nan)[:2])
    assert [e.group_rewards for e in examples] == [(1.0, 0.0)] * 2


def test_a_log_prob_or_token_reward_that_is_no_number_takes_out_its_experience():
    broken, other, third = worked()
    broken.sequences[0].logprobs[1] = math.nan
    third = dataclasses.replace(third, token_rewards=np.full(5, math.nan, np.float32))
    assert usable([broken, other, third]) == [other]


def test_good_examples_pass_as_they_are():
    examples = worked()
    assert all(a is b for a, b in zip(usable(examples), examples, strict=True))


def test_measured_values_stand_at_the_trained_tokens():
    examples = with_measured(worked(), {"ref_logprobs": np.arange(1, 6, dtype=np.float32)})
    found = [e.sequences[0].ref_logprobs for e in examples]
    assert [f.tolist() for f in found if f is not None] == [
        [0, 1, 2],
        [0, 3],
        [0, 0, 4, 0, 5],
    ]


def referenced() -> list[TrainingExample]:
    """Recorded 1/2 everywhere; the reference has 1/4, 1/2 | 1/4 | 1/2, 1/8 at trained tokens."""
    reference = np.log(np.array([0.25, 0.5, 0.25, 0.5, 0.125], np.float32))
    return with_measured(worked(), {"ref_logprobs": reference})


def test_the_kl_penalty_lowers_each_tokens_reward_and_the_groups():
    """k1 is ln 2, 0 | ln 2 | 0, 2 ln 2; coefficient 1/2."""
    kl = algorithm(kl_penalty_fn=FunctionSettings("k1", {"kl_coef": 0.5})).kl_penalty
    examples, metrics = penalised(referenced(), kl, 0.5)
    rewards = [3 - 0.5 * LN2, -0.5 * LN2, -LN2]
    assert [e.reward for e in examples] == pytest.approx(rewards)
    assert examples[0].group_rewards == pytest.approx(rewards)
    expected = ([-0.5 * LN2, 3.0], [-0.5 * LN2], [0.0, -LN2])
    for example, tokens in zip(examples, expected, strict=True):
        np.testing.assert_allclose(token_rewards(example), tokens, atol=1e-6)
    assert metrics == {"critic/kl": pytest.approx(4 * LN2 / 5), "critic/kl_coeff": 0.5}


def test_the_kl_penalty_keeps_the_reward_of_a_sibling_that_is_not_here():
    kl = algorithm(kl_penalty_fn=FunctionSettings("k1")).kl_penalty
    (one, _), _ = penalised(referenced()[:2], kl, 0.5)
    assert one.group_rewards[2] == 0.0


def test_a_kl_penalty_asks_for_the_reference_and_not_for_a_loss():
    chosen = algorithm(kl_loss_fn=NO_KL, kl_penalty_fn=FunctionSettings("k1"))
    assert chosen.needs_reference and not chosen.reads_reference
    assert chosen.measures == {"ref_logprobs"}


def test_length_bias_compares_what_is_trained_with_what_was_produced():
    """Member 0 lies at the mean of 1, 0, 2: its two tokens move nothing, the other three do."""
    examples = rewarded(1.0, 0.0, 2.0)
    chosen = algorithm("dapo", advantage_fn=CENTRED)
    objective = prepare(examples, chosen)
    assert (objective.num_trained_examples, objective.num_trained_tokens) == (2, 3)
    assert length_bias(examples, objective) == {
        "response_length/trained_mean": pytest.approx(1.5),
        "response_length/trained_ratio": pytest.approx(1.5 / (5 / 3)),
    }
    assert length_bias([], prepare([], chosen)) == {}


def test_sequences_at_the_length_limit_are_counted_and_trained_as_others():
    examples = worked()
    cut = dataclasses.replace(examples[0].sequences[0], is_truncated=True)
    examples[0] = dataclasses.replace(examples[0], sequences=(cut,))
    assert batch_metrics(examples)["response_length/clip_ratio"] == pytest.approx(1 / 3)
    chosen = algorithm(advantage_fn=CENTRED, kl_loss_fn=NO_KL)
    assert whole_loss(chosen, examples)[0] == whole_loss(chosen, worked())[0]


def three_groups() -> list[TrainingExample]:
    """The rewards of the second are equal."""
    rewards = ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))
    return [
        dataclasses.replace(e, group_id=f"g.{n}", group_rewards=r, group_slot_index=i, reward=r[i])
        for n, r in enumerate(rewards)
        for i, e in enumerate(worked()[:2])
    ]


def test_a_group_without_a_signal_gives_its_place_to_a_copy_of_another():
    args = {"std_threshold": 0.0, "duplicate_experiences": True}
    chosen = algorithm(advantage_fn=FunctionSettings("grpo", args), kl_loss_fn=NO_KL)
    first, again = prepare(three_groups(), chosen), prepare(three_groups(), chosen)
    assert first.advantages.tolist() == again.advantages.tolist()
    good = [
        pair for pair in zip(three_groups(), range(6), strict=True) if pair[0].group_id != "g.1"
    ]
    copies = refilled(good, 3)[4:]
    assert [n for _, n in copies] in ([0, 1], [4, 5])
    by_hand = prepare([e for e, _ in [*good, *copies]], algorithm(kl_loss_fn=NO_KL))
    np.testing.assert_array_equal(first.advantages, by_hand.advantages)
    np.testing.assert_array_equal(first.weights, by_hand.weights)
    np.testing.assert_array_equal(first.flat.tokens, by_hand.flat.tokens)
    assert first.num_trained_examples == 6


def test_rows_of_an_expert_are_neither_copied_nor_places_to_fill():
    args = {"std_threshold": 0.0, "duplicate_experiences": True}
    chosen = algorithm("mix", advantage_fn=FunctionSettings("grpo", args))
    rows = [
        dataclasses.replace(e, group_id=f"sft.{i}", group_rewards=(), is_expert=True)
        for i, e in enumerate(worked() * 3)
    ]
    ready = prepare([*three_groups(), *rows], chosen)
    assert ready.is_expert.tolist() == [False] * 4 + [True] * 9 + [False] * 2
    assert [e.group_id for e, _ in refilled([(rows[0], 0.0)], 3)] == ["sft.0"]


def test_a_batch_without_any_signal_is_filled_with_nothing():
    assert refilled([], 3) == []
    assert {e.group_id for e, _ in refilled([(three_groups()[0], 1.0)], 9)} == {"g.0"}
