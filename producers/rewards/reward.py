"""What a reward function sees and gives: a whole rollout in, named parts out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...schemas.errors import StreamrftError, Timeout
from ...streams.registry import Registry

REWARDS = Registry("reward_fn", binds_functions=True)


@dataclass(frozen=True)
class RolloutView:
    """One rollout as a reward function sees it.

    `prompt` is the text of the last message before the response; `response` what the policy
    wrote, with the reply prefix and without special tokens; `truth` the known answer of the row.
    """

    prompt: str
    response: str
    truth: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    finish_reason: str = "stop"


class RewardFunction(Protocol):
    """Called once a rollout, outside the main thread; it may block."""

    def __call__(self, rollout: RolloutView, /) -> Mapping[str, float]:
        """Named parts of the reward, such as accuracy and format; each becomes a source."""
        ...


class RewardFailed(StreamrftError, ValueError):
    """A reward function gave no usable score: the rollout is failed, with this reason.

    `is_final`: the same rollout would fare no better another time.
    """

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final


def score_all(
    function: Callable[..., Any], rollouts: Sequence[RolloutView], *, raise_timeout: bool
) -> list[dict[str, float] | RewardFailed]:
    """Score each rollout; one that cannot be scored harms no other.

    What the function itself raises may be tried again. `raise_timeout`: pass a Timeout on.
    """
    call = by_view(function)
    found: list[dict[str, float] | RewardFailed] = []
    for rollout in rollouts:
        try:
            found.append(named_parts(call(rollout)))
        except RewardFailed as error:
            found.append(error)
        except Timeout as error:
            if raise_timeout:
                raise
            found.append(RewardFailed(str(error)))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = f"the reward function raised {type(error).__name__}: {error}"
            found.append(RewardFailed(reason, is_final=False))
    return found


def by_view(function: Callable[..., Any]) -> Callable[[RolloutView], Any]:
    """The function as one of a RolloutView.

    One that takes `response` by name, as Trinity's do, is given response, prompt and truth.
    """
    names = inspect.signature(function).parameters
    if "response" not in names:
        return function

    def call(view: RolloutView) -> Any:
        every = {"response": view.response, "prompt": view.prompt, "truth": view.truth}
        return function(**{k: v for k, v in every.items() if k in names})

    return call


def score(function: Callable[..., Any], rollout: RolloutView) -> dict[str, float]:
    """Named parts of one rollout. Raises RewardFailed, or whatever the function raises."""
    return named_parts(by_view(function)(rollout))


def named_parts(parts: Any) -> dict[str, float]:
    """What a reward function gave, as finite numbers by name.

    Raises:
        RewardFailed: no parts, or a part that is not a finite number; never taken for 0.
    """
    if isinstance(parts, (int, float)):
        parts = {"reward": parts}
    if not isinstance(parts, Mapping) or not parts:
        raise RewardFailed(f"the reward function gave {parts!r}; it must give named numbers")
    return {str(name): _number(name, value) for name, value in parts.items()}


def _number(name: Any, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"reward part {name!r} is {value!r}, not a number") from error
    if not math.isfinite(number):
        raise RewardFailed(f"reward part {name!r} is {number}, not a finite number")
    return number
