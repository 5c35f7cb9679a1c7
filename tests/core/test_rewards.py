"""Rewards by rule: right answers in every dress, wrong ones in none; no score is invented."""

from __future__ import annotations

import math
import sys
import threading
from fractions import Fraction

import pytest

from streamrft.producers.rewards import (
    REWARDS,
    MathDapoReward,
    RewardFailed,
    RolloutView,
    score,
)
from streamrft.producers.rewards.answers import final_answer, plain_number
from streamrft.producers.rewards.reward import score_all
from streamrft.producers.rewards.verifier import VERIFIER, MathVerifier
from streamrft.schemas.errors import ConfigError, Timeout
from streamrft.streams.registry import Registry

TAGGED = "<think>48 and 24</think> <answer>72</answer>"


@pytest.fixture(scope="module", autouse=True)
def no_child_left():
    yield
    VERIFIER.close()


def judge(name: str, response: str, truth: str | None = "72", row=None, **args) -> dict:
    view = RolloutView(prompt="q", response=response, truth=truth, row=row or {})
    return score(REWARDS.create(name, args), view)


@pytest.mark.parametrize(
    "response",
    [
        "72",
        "48 + 24 = 72",
        "The answer is 72.",
        "answer: 72 clips",
        r"so \boxed{72}",
        r"\boxed{\boxed{72}}",
        r"first \boxed{1}, then \boxed{72}",
        "#### 72",
        TAGGED,
        "$72",
        "$72$",
        r"\$72",
        "72.0",
        "72.",
        "72%",
        "It makes 72.00 dollars",
    ],
)
def test_right_answer_counts_in_every_dress(response):
    assert judge("accuracy_reward", response) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    "response",
    ["", "no idea", "71", "72 or rather 73", r"72 \boxed{7}", "172", "72.5", "-72", "7 2", "x72"],
)
def test_wrong_answer_counts_nothing(response):
    assert judge("accuracy_reward", response) == {"accuracy": 0.0}


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("1000", "1,000"),
        ("1,000", "1000"),
        (r"\boxed{0.5}", "1/2"),
        ("3/4", "0.75"),
        ("-5", "\u22125"),
        ("48 #### 24 #### 72", "48 + 24\n#### 72"),
        (r"\boxed{Paris}", "Paris"),
    ],
)
def test_numbers_are_equal_by_value(response, truth):
    assert judge("accuracy_reward", response, truth) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"\boxed{\frac{144}{2}}", "72", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{2}{4}", 1.0),
        (r"\boxed{(x+1)^2}", r"x^2+2x+1", 1.0),
        (r"\boxed{\sqrt{2}}", r"\sqrt{3}", 0.0),
        (r"\boxed{{}", "72", 0.0),
        (r"\boxed{\frac{}", "x", 0.0),
    ],
)
def test_expressions_are_compared_by_meaning(response, truth, right):
    assert judge("accuracy_reward", response, truth) == {"accuracy": right}


def test_verification_works_off_the_main_thread_and_from_many():
    found: list[float] = []

    def body() -> None:
        found.append(judge("accuracy_reward", r"\boxed{\frac{144}{2}}")["accuracy"])

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [1.0] * 4


def test_verification_that_does_not_end_is_stopped_and_the_next_works(monkeypatch):
    verifier = MathVerifier()
    assert verifier.is_equal("x", r"\boxed{x}")
    monkeypatch.setattr(verifier, "_timeout_s", 0.3)
    with pytest.raises(Timeout, match="math_verify on"):
        verifier.is_equal("x", r"\boxed{9^{9^{9^{9^9}}} - x}" * 50)
    assert verifier.is_equal("x", r"\boxed{x}")
    verifier.close()


def test_row_without_a_known_answer_is_a_failure_not_a_zero():
    with pytest.raises(RewardFailed, match="no known answer"):
        judge("math_reward", "72", None)


def test_math_reward_is_accuracy_and_format():
    assert judge("math_reward", TAGGED) == {"accuracy": 1.0, "format": 0.1}
    assert judge("math_reward", "72") == {"accuracy": 1.0, "format": -0.1}
    assert judge("math_reward", TAGGED.replace("72", "71")) == {"accuracy": 0.0, "format": 0.1}


def test_math_boxed_reward_reads_the_box_only():
    assert judge("math_boxed_reward", r"so \boxed{72}") == {"accuracy": 1.0, "format": 0.0}
    assert judge("math_boxed_reward", "72") == {"accuracy": 0.0, "format": 0.0}
    assert judge("math_boxed_reward", r"\boxed{72}", with_think=True)["format"] == -0.1
    thought = r"<think>x</think> \boxed{72}"
    assert judge("math_boxed_reward", thought, with_think=True)["format"] == 0.0


def test_format_reward_takes_a_pattern():
    assert judge("format_reward", "a\nb", pattern="a.b", score=1) == {"format": 1}
    assert judge("format_reward", "ab", pattern="a.b", score=1) == {"format": -1}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>(3 + 5) * 2</answer>", 1.0),
        ("<answer>3 * 2 + 5 * 2 = 16</answer>", 0.1),
        ("<answer>3 + 5 + 2</answer>", 0.1),
        ("<answer>3 ** 5 ** 2 ** 9</answer>", 0.1),
        ("<answer>(3 + 5</answer>", 0.1),
        ("<answer>2 / (3 - 5 + 2)</answer>", 0.1),
        ("<answer>sixteen</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_wants_each_number_once_and_the_target(response, score):
    row = {"numbers": [3, 5, 2], "target": 16}
    assert judge("countdown_reward", response, row=row) == {"score": score}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a 1 b 2 c", "2"),
        ("cost $1,234.50 now", "$1,234.50"),
        ("10-5", "5"),
        ("= -5", "-5"),
        ("v2 and 3rd", None),
        (r"\boxed{a{b}c} tail", "a{b}c"),
        (r"\boxed{unclosed", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_plain_number_is_exact():
    assert plain_number("0.1") == Fraction(1, 10)
    assert plain_number("12,34") is None and plain_number("1/0") is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"accuracy": math.nan}, "accuracy.*nan, not a finite"),
        ({"a": math.inf}, "inf, not a finite"),
        ({"a": "high"}, "'high', not a number"),
        ({"a": None}, "None, not a number"),
        ({}, "must give named numbers"),
        (None, "must give named numbers"),
    ],
)
def test_score_that_is_none_is_refused(given, says):
    with pytest.raises(RewardFailed, match=says):
        score(lambda rollout: given, RolloutView(prompt="", response=""))


def test_function_may_take_the_rollout_or_trinitys_names():
    view = RolloutView(prompt="p", response="r", truth="t", row={"a": 1})
    assert score(lambda rollout: {"n": len(rollout.row)}, view) == {"n": 1.0}
    assert score(lambda response, truth: {"same": response == truth}, view) == {"same": 0.0}
    assert score(lambda response, prompt=None, **_: len(response + prompt), view) == {"reward": 2}


def test_registry_reaches_dotted_paths_and_names_the_nearest():
    assert REWARDS.create("statistics.fmean", {})([3, 4]) == 3.5
    with pytest.raises(ConfigError, match="Did you mean 'math_reward'"):
        REWARDS.create("maths_reward", {})
    with pytest.raises(ConfigError, match="cannot be imported"):
        REWARDS.create("nowhere.Reward", {})
    with pytest.raises(ConfigError, match="argument of reward_fn 'math_reward' 'wrong'"):
        REWARDS.create("math_reward", {"wrong": 1})


def test_plugin_may_replace_a_name():
    registry = Registry("reward_fn")
    registry.register("mine")(dict)
    registry.register("mine")(list)
    assert registry.create("mine", {}) == []


def test_a_reward_that_exits_costs_one_rollout():
    def leave(rollout):
        sys.exit(3)

    (found,) = score_all(leave, [RolloutView("q", "r")], raise_timeout=False)
    assert isinstance(found, RewardFailed) and "raised SystemExit: 3" in str(found)


@pytest.mark.parametrize(
    "num_tokens, penalty", [(80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5), (101, -0.5)]
)
def test_dapo_makes_answers_dear_towards_the_limit(num_tokens: int, penalty: float):
    """Limit 100 tokens, the last 20 of them penalised, at most 0.5."""
    reward = MathDapoReward(
        enable_overlong_penalty=True, penalty_factor=0.5, max_response_length=100, cache_length=20
    )
    view = RolloutView("2+2?", "\\boxed{4}", truth="4", num_tokens=num_tokens)
    assert reward(view) == {"accuracy": 1.0, "format_score": pytest.approx(penalty)}
    assert MathDapoReward()(view) == {"accuracy": 1.0, "format_score": 0.0}


def test_dapos_penalty_needs_both_lengths():
    with pytest.raises(ValueError, match="max_response_length 100 and cache_length None"):
        MathDapoReward(enable_overlong_penalty=True, max_response_length=100)
