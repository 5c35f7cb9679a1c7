"""Rewards by rule, by the names that users of Trinity know."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from .answers import final_answer, last_boxed, plain_number
from .reward import REWARDS, RewardFailed, RolloutView
from .verifier import VERIFIER

_THINK_ANSWER = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
_THINK = r".*?<think>.*?</think>.*$"


def accuracy(response: str, truth: str | None) -> float:
    """1 when the response's final answer means the same as `truth`, else 0.

    Plain numbers are compared exactly; anything else is left to math_verify.

    Raises:
        RewardFailed: the row has no known answer.
        Timeout: math_verify did not come to an end.
    """
    if truth is None:
        raise RewardFailed("the row has no known answer; set format.response_key of the taskset")
    wanted = last_boxed(truth) or truth.rsplit("####", 1)[-1].strip()
    answer = final_answer(response)
    if answer is None:
        return 0.0
    if answer == wanted:
        return 1.0
    numbers = plain_number(wanted), plain_number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(VERIFIER.is_equal(wanted, f"\\boxed{{{answer}}}"))


@REWARDS.register("accuracy_reward")
class AccuracyReward:
    """accuracy: 1 for a right final answer, else 0."""

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        return {"accuracy": accuracy(rollout.response, rollout.truth)}


@REWARDS.register("format_reward")
class FormatReward:
    """format: `score` when the whole response matches `pattern`, else minus `score`."""

    def __init__(self, pattern: str = _THINK_ANSWER, score: float = 0.1) -> None:
        """`pattern` is a regular expression in which a dot matches a line end too."""
        self._pattern, self._score = re.compile(pattern, re.DOTALL), score

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        fits = self._pattern.match(rollout.response) is not None
        return {"format": self._score if fits else -self._score}


@REWARDS.register("math_reward")
class MathReward:
    """accuracy 0 or 1, and format 0.1 or -0.1 for `<think>..</think> <answer>..</answer>`."""

    def __init__(self, pattern: str = _THINK_ANSWER, format_score: float = 0.1) -> None:
        self._format = FormatReward(pattern, format_score)

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        return {"accuracy": accuracy(rollout.response, rollout.truth)} | self._format(rollout)


@REWARDS.register("math_boxed_reward")
class MathBoxedReward:
    r"""accuracy of the last \boxed{}; format -0.1 where thoughts are due and missing."""

    def __init__(self, with_think: bool = False, format_score_coef: float = 0.1) -> None:
        self._with_think, self._coef = with_think, format_score_coef

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        boxed = last_boxed(rollout.response)
        right = 0.0 if boxed is None else accuracy(f"\\boxed{{{boxed}}}", rollout.truth)
        thinks = re.match(_THINK, rollout.response, re.DOTALL) is not None
        return {
            "accuracy": right,
            "format": -self._coef if self._with_think and not thinks else 0.0,
        }


@REWARDS.register("countdown_reward")
class CountdownReward:
    """score: 1 for an equation that uses each number once and gives the target, 0.1 for a try.

    The row holds `numbers` (or `nums`) and `target`; the equation is the tagged or boxed answer.
    """

    def __init__(self, format_score: float = 0.1) -> None:
        self._format_score = format_score

    def __call__(self, rollout: RolloutView) -> dict[str, float]:
        """Score one rollout."""
        numbers, target = _countdown(rollout.row)
        answer = final_answer(rollout.response)
        if answer is None or not re.fullmatch(r"[\d+\-*/(). =]+", answer):
            return {"score": 0.0}
        equation = answer.split("=")[0]
        used = Counter(int(n) for n in re.findall(r"\d+", equation))
        is_right = used == Counter(numbers) and _value(equation) == target
        return {"score": 1.0 if is_right else self._format_score}


def _countdown(row: Mapping[str, object]) -> tuple[list[int], Fraction]:
    numbers = row.get("numbers", row.get("nums"))
    if not isinstance(numbers, list) or "target" not in row:
        raise RewardFailed(f"countdown needs numbers and target; the row has {', '.join(row)}")
    return [int(n) for n in numbers], Fraction(str(row["target"]))


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(equation: str) -> Fraction | None:
    """Exact value of an expression of + - * / and integers; None when it is none."""
    try:
        return _fold(ast.parse(equation.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _fold(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_fold(node.left), _fold(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_fold(node.operand)
    raise ValueError("not an expression of numbers")
