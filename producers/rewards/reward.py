"""What a reward function sees and gives: a whole rollout in, named parts out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...schemas.errors import StreamrftError
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
    """A reward function gave no usable score: the rollout is failed, with this reason."""


def score(function: Callable[..., Any], rollout: RolloutView) -> dict[str, float]:
    """Call a reward function.

    One that takes `response` by name, as Trinity's do, is given response, prompt and truth.

    Raises:
        RewardFailed: no parts, or a part that is not a finite number; never taken for 0.
    """
    names = inspect.signature(function).parameters
    if "response" in names:
        every = {"response": rollout.response, "prompt": rollout.prompt, "truth": rollout.truth}
        parts = function(**{k: v for k, v in every.items() if k in names})
    else:
        parts = function(rollout)
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
