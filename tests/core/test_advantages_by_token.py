"""Advantages with one value a token or a step: critic, agents, teachers, entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from loss_cases import worked

from streamrft.consumers.algorithms import ADVANTAGES
from streamrft.consumers.algorithms.advantages.returns import gae
from streamrft.consumers.algorithms.build import build_algorithm
from streamrft.consumers.learning.examples import TrainingExample, TrainingSequence
from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings


def filled(examples: list[TrainingExample], **fields: Sequence[Sequence[float]]) -> list:
    """The examples with arrays [T] in their only sequence, one list an example."""
    result = []
    for i, e in enumerate(examples):
        (sequence,) = e.sequences
        arrays = {name: np.array(values[i], np.float32) for name, values in fields.items()}
        result.append(dataclasses.replace(e, sequences=(dataclasses.replace(sequence, **arrays),)))
    return result


def test_gae_is_the_papers_sum_of_td_errors():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    gamma, lam = 0.9, 0.8
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(7 - t)) for t in range(7)]
    np.testing.assert_allclose(gae(rewards, values, gamma, lam), expected)


def test_gae_with_lambda_one_is_the_return_less_the_value():
    rewards, values = np.array([0.0, 0.0, 2.0]), np.array([0.5, 1.0, 1.5])
    np.testing.assert_allclose(gae(rewards, values, 1.0, 1.0), [1.5, 1.0, 0.5])


def test_ppo_by_hand_whitens_over_the_batch_and_skips_the_hole():
    """Rewards 3, 0, 0 at the last trained tokens; values of untrained tokens must not count.

    lambda 0: r + V' - V is 1 - 2, 3 - 1 | -1 | 4 - 3, -4.
    """
    values = ([9, 2, 1], [9, 1], [9, 9, 3, 9, 4])
    examples = filled(worked(), values=values)
    result = ADVANTAGES.create("ppo", {"lam": 0.0})(examples)
    raw = np.array([-1.0, 2.0, -1.0, 1.0, -4.0])
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(result), expected, rtol=1e-6)
    assert [len(r) for r in result] == [2, 1, 2]


def steps(
    num: int, reward: float, index: int, rewards: tuple[float, ...], **changes: object
) -> TrainingExample:
    """A trajectory of `num` steps, the i-th of which has i + 1 trained tokens."""
    return TrainingExample(
        trajectory_id=f"g:{index}:a",
        group_id="g",
        slot=index,
        number=0,
        sequences=tuple(
            TrainingSequence(
                np.arange(i + 2, dtype=np.int32),
                np.ones(i + 2, np.uint8),
                np.zeros(i + 2, np.float32),
            )
            for i in range(num)
        ),
        reward=reward,
        group_rewards=rewards,
        group_slot_index=index,
        **changes,  # pyright: ignore[reportArgumentType]
    )


def test_every_step_has_its_trajectorys_advantage():
    """3, 0, 0: 2, -1, -1 by sqrt 3; by hand with 1, 2 and 3 steps."""
    rewards = (3.0, 0.0, 0.0)
    examples = [steps(i + 1, r, i, rewards) for i, r in enumerate(rewards)]
    values = ADVANTAGES.create("step_wise_grpo", {})(examples)
    np.testing.assert_allclose(values, np.array([2, -1, -1]) / np.sqrt(3), rtol=1e-5)
    values = ADVANTAGES.create("step_wise_grpo", {"enable_step_norm": True})(examples)
    np.testing.assert_allclose(values, np.array([2, -0.5, -1 / 3]) / np.sqrt(3), rtol=1e-5)
    values = ADVANTAGES.create("step_wise_grpo", {"std_cal_level": "none"})(examples)
    assert values == [2.0, -1.0, -1.0]


def test_step_wise_groups_without_spread_or_siblings_are_left_out_where_a_threshold_asks():
    make = ADVANTAGES.create("step_wise_grpo", {"std_threshold": 0.0})
    assert make([steps(1, 1.0, 0, (1.0, 1.0)), steps(1, 1.0, 1, (1.0, 1.0))]) == [None, None]
    assert make([steps(1, 1.0, 0, (1.0,))]) == [None]


def gigpo_batch() -> list[TrainingExample]:
    """Step rewards (1, 2), (0, 0), (0) in states (s, u), (s, v), (s)."""
    rewards = (3.0, 0.0, 0.0)
    return [
        steps(2, 3.0, 0, rewards, step_rewards=(1.0, 2.0), state_hashes=("s", "u")),
        steps(2, 0.0, 1, rewards, step_rewards=(0.0, 0.0), state_hashes=("s", "v")),
        steps(1, 0.0, 2, rewards, step_rewards=(0.0,), state_hashes=("s",)),
    ]


def test_gigpo_by_hand():
    """A_E is 2, -1, -1. Discounted by 1/2 the returns in s are 2, 0, 0: A_S 4/3, -2/3, -2/3.

    u and v were seen once, so their A_S is 0. The second step has two tokens.
    """
    first, second, third = ADVANTAGES.create("gigpo", {"gamma": 0.5})(gigpo_batch())
    np.testing.assert_allclose(first, [2 + 4 / 3, 2, 2], rtol=1e-5)
    np.testing.assert_allclose(second, [-1 - 2 / 3, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(third, [-1 - 2 / 3], rtol=1e-5)


def test_gigpo_divides_by_the_unbiased_std_and_weighs_steps_by_omega():
    values = ADVANTAGES.create("gigpo", {"gamma": 0.5, "omega": 3.0, "fnorm": "std"})
    episode = np.array([2.0, -1.0, -1.0]) / (np.std([3, 0, 0], ddof=1) + 1e-6)
    state = np.array([4, -2, -2]) / 3 / (np.std([2, 0, 0], ddof=1) + 1e-6)
    heads = [v[0] for v in values(gigpo_batch())]
    np.testing.assert_allclose(heads, episode + 3 * state, rtol=1e-6)


def test_gigpo_compares_states_within_a_group_only():
    first = gigpo_batch()
    other = [
        dataclasses.replace(e, group_id="h", step_rewards=(9.0,) * len(e.sequences))
        for e in gigpo_batch()
    ]
    alone = ADVANTAGES.create("gigpo", {})(first)
    both = ADVANTAGES.create("gigpo", {})(first + other)
    for a, b in zip(alone, both[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_gigpo_without_states_or_step_rewards_is_the_group_advantage_of_the_outcome():
    rewards = (3.0, 0.0, 0.0)
    examples = [steps(2, r, i, rewards) for i, r in enumerate(rewards)]
    values = ADVANTAGES.create("gigpo", {})(examples)
    np.testing.assert_allclose([v[0] for v in values], [2, -1, -1], rtol=1e-5)


TEACHER = ([0.1, 0.25, 0.5], [0.1, 1.0], [0.1, 0.1, 0.5, 0.1, 0.25])


def taught() -> list[TrainingExample]:
    return filled(worked(), teacher_logprobs=[np.log(p) for p in TEACHER])


def test_on_policy_distillation_by_hand():
    """Teacher 1/4, 1/2 | 1 | 1/2, 1/4 against the policy's 1/2: -ln 2, 0 | ln 2 | 0, -ln 2."""
    values = ADVANTAGES.create("on_policy_distill", {"kl_coef": 2.0})(taught())
    expected = 2 * np.log(2) * np.array([-1, 0, 1, 0, -1])
    np.testing.assert_allclose(np.concatenate(values), expected, atol=1e-6)


def test_jsd_by_hand():
    """Equal probabilities give 0; 1/4 and 1 against 1/2 with mixtures 3/8 and 3/4."""
    low = 0.5 * (0.25 * np.log(2 / 3) + 0.5 * np.log(4 / 3))
    high = 0.5 * (1.0 * np.log(4 / 3) + 0.5 * np.log(2 / 3))
    values = ADVANTAGES.create("jsd", {})(taught())
    np.testing.assert_allclose(np.concatenate(values), [-low, 0, -high, 0, -low], atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_jsd_is_the_papers_term_at_every_mixture(share: float):
    rng = np.random.default_rng(3)
    q, p = rng.uniform(0.01, 1, 5), rng.uniform(0.01, 1, 5)
    masks = ([0] + [1] * 5,)
    examples = filled(worked(masks, [[0.5, *p]], (0.0,)), teacher_logprobs=[np.log([0.5, *q])])
    m = share * q + (1 - share) * p
    expected = share * q * np.log(q / m) + (1 - share) * p * np.log(p / m)
    values = ADVANTAGES.create("jsd", {"lambda_coef": share, "kl_coef": 3.0})(examples)
    np.testing.assert_allclose(values[0], -3 * expected * (0 < share < 1), atol=1e-6)


def entropy_batch(num: int = 40) -> list[TrainingExample]:
    """Two members, rewards 1 and 0, with random signals at `num` tokens each."""
    rng = np.random.default_rng(7)
    masks = [[0] + [1] * num] * 2
    examples = worked(masks, [[0.5] * (num + 1)] * 2, (1.0, 0.0))
    return filled(
        examples,
        current_logprobs=[-rng.exponential(size=num + 1) for _ in range(2)],
        entropies=[0.3 * rng.exponential(size=num + 1) for _ in range(2)],
        expected_signals=[2 * rng.normal(size=num + 1) for _ in range(2)],
    )


def signals(examples: list[TrainingExample]) -> tuple[np.ndarray, np.ndarray]:
    """S and D of the trained tokens, [N]."""
    parts = [e.sequences[0] for e in examples]
    logp = np.concatenate([s.current_logprobs[1:] for s in parts]).astype(float)  # pyright: ignore
    h = np.concatenate([s.entropies[1:] for s in parts]).astype(float)  # pyright: ignore
    n = np.concatenate([s.expected_signals[1:] for s in parts]).astype(float)  # pyright: ignore
    s = np.exp(logp) * (h + logp)
    return s, n - s


def test_clipb_takes_bad_tokens_that_would_lower_the_entropy_most():
    examples = entropy_batch()
    s, _ = signals(examples)
    is_bad = np.repeat([False, True], 40)
    is_out = is_bad & (s - s.mean() < -0.8 * s.std())
    assert 0 < is_out.sum() < 40
    values = np.concatenate(ADVANTAGES.create("clipb", {"mu": 0.8})(examples))
    advantage = 0.5 / (np.sqrt(0.5) + 1e-6)
    expected = np.where(is_out, 0.0, np.where(is_bad, -advantage, advantage))
    np.testing.assert_allclose(values, expected)


@pytest.mark.parametrize("max_frac, limit", [(1.0, 80), (0.05, 4), (0.0, 1)])
def test_clipv_takes_the_bad_tokens_of_the_largest_distance_up_to_its_share(
    max_frac: float, limit: int
):
    examples = entropy_batch()
    _, d = signals(examples)
    is_bad = np.repeat([False, True], 40)
    candidates = np.flatnonzero(is_bad & (d > 0.5 * d.std()))
    assert len(candidates) > 4
    chosen = sorted(candidates, key=lambda i: -d[i])[:limit]
    function = ADVANTAGES.create("clipv", {"mu": 0.5, "max_frac": max_frac})
    values = np.concatenate(function(examples))
    np.testing.assert_array_equal(np.flatnonzero(values == 0), sorted(chosen))


def test_entropy_clips_ask_for_what_they_read():
    def measures(name: str) -> frozenset[str]:
        settings = AlgorithmSettings(advantage_fn=FunctionSettings(name))
        return build_algorithm(settings).measures

    assert measures("clipb") == {"current_logprobs", "entropies"}
    assert measures("clipv") == {"current_logprobs", "entropies", "expected_signals"}
    assert measures("grpo") == frozenset()
