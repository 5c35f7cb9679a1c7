"""Filters and mappers: Trinity's names, semantics and defaults, with numbers in every rejection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from filter_groups import joined, member, rejected
from join_scripts import sequence

from streamrft.schemas import arrays
from streamrft.schemas.errors import ConfigError
from streamrft.streams.filters import (
    DapoDynamicSampling,
    InvalidRewardFilter,
    LengthFilter,
    MaskResponseTruncated,
    PassRateCalculator,
    RewardFilter,
    RewardShapingMapper,
    RewardStdFilter,
    build_filters,
)
from streamrft.streams.settings import OperatorSettings


def members(*rewards: float):
    return [member(slot, reward) for slot, reward in enumerate(rewards)]


def test_reward_filter_keeps_what_reaches_the_threshold():
    assert rejected(RewardFilter(0.5), *members(0.4, 0.5, 1.0)) == {
        0: "reward 0.4 is below threshold 0.5"
    }
    assert set(rejected(RewardFilter(), *members(-0.1, 0.0))) == {0}


@dataclass(frozen=True)
class Case:
    rewards: tuple[float, ...]
    is_kept: bool
    threshold: float = 0.0


@pytest.mark.parametrize(
    "case",
    [
        Case((1.0, 0.0), True),
        Case((1.0, 1.0, 1.0), False),
        Case((0.1, 0.1, 0.1), False),
        Case((1.0,), False),
        Case((1.0, 0.0), False, threshold=0.5),
        Case((1.0, 0.0), True, threshold=0.49),
    ],
)
def test_reward_std_filter_keeps_groups_whose_rewards_differ(case):
    found = rejected(RewardStdFilter(case.threshold), *members(*case.rewards))
    assert (not found) == case.is_kept
    assert case.is_kept or set(found) == set(range(len(case.rewards)))


@pytest.mark.parametrize(
    ("accuracies", "is_kept"),
    [((1.0, 0.0), True), ((1.0, 1.0), False), ((0.0, 0.0), False), ((1.0,), False)],
)
def test_dapo_dynamic_sampling_drops_groups_with_all_or_none_right(accuracies, is_kept):
    rollouts = [member(slot, 9.0, accuracy=a) for slot, a in enumerate(accuracies)]
    found = rejected(DapoDynamicSampling(), *rollouts)
    assert (not found) == is_kept
    if not is_kept:
        right = sum(a > 0 for a in accuracies)
        assert found[0] == f"{right} of {len(accuracies)} have accuracy above 0"


def test_dapo_dynamic_sampling_takes_a_reward_part_and_then_the_reward():
    one, other = members(5.0, 5.0)
    one.parts, other.parts = {"accuracy": 1.0}, {"accuracy": 0.0}
    assert not rejected(DapoDynamicSampling(), one, other)
    assert rejected(DapoDynamicSampling("elsewhere"), one, other)
    assert not rejected(DapoDynamicSampling("elsewhere", 1.0), *members(0.5, 2.0))


def test_invalid_reward_filter_drops_what_is_not_finite():
    assert rejected(InvalidRewardFilter(), *members(math.nan, 1.0, math.inf)) == {
        0: "reward is nan",
        2: "reward is inf",
    }


def test_truncated_sequences_leave_the_loss():
    cut, whole = sequence(5, truncated=True), sequence(3)
    both, one, none = (
        member(0, 1.0, sequences=[cut, whole]),
        member(1, 1.0, sequences=[cut]),
        member(2, 1.0, sequences=[whole]),
    )
    assert rejected(MaskResponseTruncated(), both, one, none) == {}
    assert both.loss_mask == arrays.pack_mask([0] * 5 + [0, 1, 1])
    assert one.loss_mask == bytes(5)
    assert none.loss_mask is None


@pytest.mark.parametrize(
    ("op", "expected"), [("ADD", 3.0), ("SUB", -1.0), ("MUL", 2.0), ("DIV", 0.5)]
)
def test_reward_shaping_combines_the_reward_with_a_statistic(op, expected):
    rollout = member(0, 1.0, quality=4.0)
    RewardShapingMapper("quality", op, weight=0.5).apply(joined(rollout))
    assert rollout.reward == expected


def test_reward_shaping_takes_trinitys_list_and_leaves_what_lacks_the_statistic():
    rollout, other = member(0, 1.0, quality=4.0, zero=0.0), member(1, 1.0)
    rules = [
        {"stats_key": "quality"},
        {"stats_key": "zero", "op_type": "DIV"},
        {"stats_key": "judge", "op_type": "MUL", "weight": 2.0},
    ]
    RewardShapingMapper(reward_shaping_configs=rules).apply(joined(rollout, other))
    assert (rollout.reward, other.reward) == (10.0, 2.0)


def test_pass_rate_is_the_mean_reward_of_all_scored_members():
    group = joined(*members(1.0, 0.0, 0.5))
    group.members.pop()
    assert PassRateCalculator().apply(group) == []
    assert [m.metrics for m in group.scored] == [{"pass_rate": 0.5}] * 3


def test_length_filter_counts_written_tokens_unless_told():
    rollouts = [member(n, 1.0, sequences=[sequence(n)]) for n in (2, 4, 8)]
    assert rejected(LengthFilter(min_tokens=2, max_tokens=3), *rollouts) == {
        2: "1 tokens written, 2 to 3 allowed",
        8: "7 tokens written, 2 to 3 allowed",
    }
    assert set(rejected(LengthFilter(max_tokens=4, count="all"), *rollouts)) == {8}


@dataclass(frozen=True)
class Wrong:
    name: str
    says: str
    args: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("reward_std_filer", "Did you mean 'reward_std_filter'"),
        Wrong("no.such.module.Filter", "cannot be imported"),
        Wrong("collections.NoSuch", "cannot be imported"),
        Wrong("collections.OrderedDict", "no method apply"),
        Wrong("reward_filter", "Did you mean 'threshold'", {"treshold": 1}),
        Wrong("reward_shaping_mapper", "none of ADD", {"stats_key": "a", "op": "POW"}),
        Wrong("length_filter", "neither written nor all", {"count": "some"}),
    ],
)
def test_a_filter_that_cannot_be_made_is_a_configuration_error(wrong):
    with pytest.raises(ConfigError, match=wrong.says):
        build_filters([OperatorSettings(wrong.name, wrong.args)])


def test_a_users_own_class_is_a_filter():
    ((name, step),) = build_filters(
        [OperatorSettings("streamrft.streams.filters.RewardFilter", {"threshold": 2.0})]
    )
    assert name == "streamrft.streams.filters.RewardFilter"
    assert set(rejected(step, *members(1.0, 3.0))) == {0}
