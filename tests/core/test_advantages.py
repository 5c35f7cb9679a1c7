from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
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
    with pytest.raises(ConfigError, match="duplicate_experiences"):
        advantages("grpo", [], duplicate_experiences=True)
    with pytest.raises(ConfigError, match="'epsilom' is unknown. Did you mean 'epsilon'"):
        advantages("grpo", [], epsilom=1.0)


def test_dr_grpo_only_centres():
    assert advantages("dr_grpo", group((3.0, 0.0, 0.0))) == pytest.approx([2.0, -1.0, -1.0])


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
