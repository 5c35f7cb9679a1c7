from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streamrft.consumers.algorithms import ADVANTAGES
from streamrft.consumers.algorithms.build import build_algorithm
from streamrft.consumers.learning.examples import TrainingExample, TrainingSequence
from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings
from streamrft.schemas.errors import ConfigError


def example(
    rewards: tuple[float, ...],
    index: int,
    *,
    group: str = "g.0",
    masks: tuple[tuple[int, ...], ...] = ((0, 1),),
    token_rewards: list[float] | None = None,
) -> TrainingExample:
    return TrainingExample(
        trajectory_id=f"{group}:{index}:a",
        group_id=group,
        slot=index,
        number=0,
        sequences=tuple(
            TrainingSequence(
                np.arange(len(m), dtype=np.int32),
                np.array(m, np.uint8),
                np.zeros(len(m), np.float32),
            )
            for m in masks
        ),
        reward=rewards[index],
        group_rewards=rewards,
        group_slot_index=index,
        token_rewards=None if token_rewards is None else np.array(token_rewards, np.float32),
    )


def group(rewards: tuple[float, ...], name: str = "g.0") -> list[TrainingExample]:
    return [example(rewards, i, group=name) for i in range(len(rewards))]


def advantages(name: str, examples: list[TrainingExample], **args: object) -> list:
    settings = AlgorithmSettings(advantage_fn=FunctionSettings(name, args))
    function = build_algorithm(settings).advantage
    assert function is not None
    return function(examples)


def test_grpo_centres_a_group_and_divides_by_the_unbiased_std():
    # rewards 1, 0, 0, 0: mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4
    values = advantages("grpo", group((1.0, 0.0, 0.0, 0.0)))
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_grpo_adds_epsilon_to_the_std():
    values = advantages("grpo", group((1.0, 0.0)), epsilon=0.5)
    assert values == pytest.approx([v / (np.sqrt(0.5) + 0.5) for v in (0.5, -0.5)])


def test_grpo_uses_the_whole_group_though_siblings_were_filtered():
    alone = [example((1.0, 0.0, 0.0, 0.0), 0)]
    assert advantages("grpo", alone) == pytest.approx([1.5], rel=1e-5)


def test_grpo_keeps_the_reward_of_a_group_of_one():
    assert advantages("grpo", [example((0.7,), 0)]) == pytest.approx([0.7], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opmd", "rec", "step_wise_grpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float):
    assert advantages(name, group((reward,) * 3)) == [0.0, 0.0, 0.0]


def test_grpo_leaves_out_groups_whose_std_is_not_above_the_threshold():
    examples = group((1.0, 1.0)) + group((1.0, 0.0), "g.1")
    values = advantages("grpo", examples, std_threshold=0.0)
    assert values[:2] == [None, None]
    assert values[2:] == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], rel=1e-5)


def test_grpo_at_batch_level_divides_by_the_std_of_all_rewards():
    examples = group((1.0, 0.0)) + group((4.0, 4.0), "g.1") + group((4.0, 0.0), "g.2")
    scale = np.std([1, 0, 4, 4, 4, 0], ddof=1) + 1e-6
    values = advantages("grpo", examples, std_cal_level="batch")
    assert values == pytest.approx(np.array([0.5, -0.5, 0, 0, 2, -2]) / scale)


def test_grpo_refuses_arguments_that_it_does_not_have():
    with pytest.raises(ConfigError, match="duplicate_experiences fills the places of groups"):
        advantages("grpo", [], duplicate_experiences=True)
    with pytest.raises(ConfigError, match="'epsilom' is unknown. Did you mean 'epsilon'"):
        advantages("grpo", [], epsilom=1.0)


def test_dr_grpo_only_centres():
    assert advantages("dr_grpo", group((3.0, 0.0, 0.0))) == pytest.approx([2.0, -1.0, -1.0])


def with_logprob(one: TrainingExample, mean: float) -> TrainingExample:
    (sequence,) = one.sequences
    logprobs = np.array([-9.0, mean], np.float32)
    return replace(one, sequences=(replace(sequence, logprobs=logprobs),))


def test_the_rank_penalty_lowers_the_likeliest_member_most():
    """Rewards 1, 1, 0 of ranks 2, 0, 1 of 3, penalty 0.3: 1 (1 - 0.2), 1, 0; mean 0.6.

    Trinity subtracts that mean from the raw rewards, so that its first two would be equal.
    """
    examples = group((1.0, 1.0, 0.0))
    examples = [with_logprob(e, m) for e, m in zip(examples, (-0.1, -2.0, -1.0), strict=True)]
    values = advantages("grpo", examples, rank_penalty=0.3)
    std = np.std([0.8, 1.0, 0.0], ddof=1)
    assert values == pytest.approx(np.array([0.2, 0.4, -0.6]) / (std + 1e-6))


def test_the_rank_penalty_leaves_a_filtered_siblings_reward_as_it_is():
    examples = group((1.0, 0.5, 0.0))[:2]
    examples = [with_logprob(e, m) for e, m in zip(examples, (-0.1, -2.0), strict=True)]
    values = advantages("grpo", examples, rank_penalty=0.4)
    penalised = np.array([0.8, 0.5, 0.0])
    expected = (penalised - penalised.mean()) / (penalised.std(ddof=1) + 1e-6)
    assert values == pytest.approx(expected[:2])


def test_opmds_baseline_is_the_mean_or_the_log_of_the_mean_exponential():
    """Rewards 0, ln 3, 0 with tau 1: log((1 + 3 + 1) / 3) = 0.5108256."""
    rewards = (0.0, float(np.log(3)), 0.0)
    assert advantages("opmd", group(rewards)) == pytest.approx(
        [-0.3662041, 0.7324082, -0.3662041], abs=1e-6
    )
    values = advantages("opmd", group(rewards), opmd_baseline="logavgexp")
    assert values == pytest.approx([-0.5108256, 0.5877867, -0.5108256], abs=1e-6)
    large = advantages("opmd", group((1000.0, 0.0)), opmd_baseline="logavgexp", tau=0.5)
    assert large == pytest.approx([0.5 * np.log(2), -1000 + 0.5 * np.log(2)])


def test_asymre_shifts_the_mean():
    assert advantages("asymre", group((1.0, 0.0, 0.5))) == pytest.approx([0.6, -0.4, 0.1])
    values = advantages("asymre", group((1.0, 0.0, 0.5)), baseline_shift=0.25)
    assert values == pytest.approx([0.25, -0.75, -0.25])


def test_rec_divides_by_the_biased_std_only_if_asked():
    rewards = (3.0, 0.0, 0.0)
    assert advantages("rec", group(rewards)) == pytest.approx([2.0, -1.0, -1.0])
    expected = np.array([2.0, -1.0, -1.0]) / (np.std(rewards) + 1e-6)
    assert advantages("rec", group(rewards), std_normalize=True) == pytest.approx(expected)


def test_rec_drops_as_many_bad_members_as_are_too_many():
    """4, 0, 0, 1: above the mean is one of four; of 0, 0, 1 the last two go, mean (4 + 0) / 2."""
    values = advantages("rec", group((4.0, 0.0, 0.0, 1.0)), drop="balance")
    assert values == pytest.approx([2.0, -2.0, 0.0, 0.0])
    assert advantages("rec", group((1.0, 1.0, 0.0)), drop="balance") == pytest.approx(
        [1 / 3, 1 / 3, -2 / 3]
    )


def test_remax_subtracts_the_greedy_rollouts_reward():
    examples = [replace(e, baseline_reward=0.75) for e in group((1.0, 0.0))]
    assert ADVANTAGES.create("remax", {})(examples) == [0.25, -0.75]


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opmd", "asymre", "rec", "step_wise_grpo"])
def test_a_group_of_one_keeps_its_reward(name: str):
    assert advantages(name, [example((0.7,), 0)]) == pytest.approx([0.7], rel=1e-5)


@pytest.mark.parametrize(
    "name, args, match",
    [
        ("opmd", {"opmd_baseline": "max"}, "opmd_baseline 'max' is neither"),
        ("opmd", {"tau": 0.0}, "tau 0.0 must be above 0"),
        ("rec", {"drop": "all"}, "drop 'all' is neither null nor 'balance'"),
        ("step_wise_grpo", {"std_cal_level": "task"}, "'task' is none of"),
        ("gigpo", {"fnorm": "max"}, "fnorm 'max' is neither"),
        ("jsd", {"lambda_coef": 2.0}, "lambda_coef 2.0 must lie in"),
        ("jsd", {"temperature": 2.0}, "temperature 2.0 is not available"),
    ],
)
def test_advantages_refuse_impossible_arguments(name: str, args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        ADVANTAGES.create(name, args)


def test_rloo_subtracts_the_mean_of_the_others():
    rewards = (0.3, 1.0, -2.0, 0.25)
    expected = [
        r - np.mean([s for j, s in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)
    ]
    assert advantages("rloo", group(rewards)) == pytest.approx(expected)


def test_reinforceplusplus_whitens_returns_over_the_trained_tokens_of_the_batch():
    examples = [
        example((1.0, 0.0), 0, masks=((0, 1, 1),)),
        example((1.0, 0.0), 1, masks=((0, 1, 0, 1, 1),)),
    ]
    returns = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    values = advantages("reinforceplusplus", examples)
    assert np.concatenate(values) == pytest.approx(expected)


def test_equal_returns_are_whitened_to_exactly_zero():
    (values,) = advantages("reinforceplusplus", [example((0.7,), 0, masks=((0, 1, 1, 1),))])
    assert values.tolist() == [0.0, 0.0, 0.0]


def test_reinforceplusplus_discounts_towards_earlier_tokens():
    values = advantages("reinforceplusplus", [example((1.0,), 0, masks=((0, 1, 1, 1),))], gamma=0.5)
    returns = np.array([0.25, 0.5, 1.0])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    assert values[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "token_rewards, returns",
    [
        pytest.param([0, 0.25, 0, 0, 0], [1.0, 0.75, 0.75], id="the rest at the end"),
        pytest.param([0, 0.25, 0.25, 0, 0.5], [1.0, 0.75, 0.5], id="all in spans"),
        pytest.param([0.5, 0, 0, 0.25, 0.25], [1.0, 0.5, 0.25], id="on untrained tokens"),
    ],
)
def test_reinforceplusplus_credits_the_tokens_of_spans(token_rewards: list, returns: list):
    one = example((1.0,), 0, masks=((0, 1, 1), (0, 1)), token_rewards=token_rewards)
    expected = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    assert advantages("reinforceplusplus", [one])[0] == pytest.approx(expected)


def test_an_advantage_of_a_users_own_is_reached_by_its_dotted_path():
    values = advantages("streamrft.consumers.algorithms.advantages.reinforce", group((0.5, 2.0)))
    assert values == [0.5, 2.0]
