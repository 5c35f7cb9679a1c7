"""Priorities by name."""

from __future__ import annotations

import pytest
from filter_groups import joined, member

from streamrft.schemas.errors import ConfigError
from streamrft.streams.priority import build_priority
from streamrft.streams.settings import OperatorSettings


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("none", {}, [0.0, 0.0]),
        ("constant", {"value": 2}, [2.0, 2.0]),
        ("recency", {}, [3.0, 3.0]),
        ("reward", {}, [1.0, 4.0]),
        ("reward_std", {}, [1.5, 1.5]),
        ("surprise", {}, [1.5, 1.5]),
        ("streamrft.streams.priority.Reward", {}, [1.0, 4.0]),
    ],
)
def test_priority_by_name(name, args, expected):
    group = joined(member(0, 1.0), member(1, 4.0))
    priority = build_priority(OperatorSettings(name, args))
    assert [priority.of(m, group) for m in group.members] == expected


def test_without_a_priority_all_are_equal():
    assert build_priority(None).of(member(0, 1.0), joined(member(0, 1.0))) == 0.0


def test_an_unknown_priority_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'recency'"):
        build_priority(OperatorSettings("recensy"))
