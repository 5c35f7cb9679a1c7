"""The port of engines: token ids in; token ids, log-probabilities and policy versions out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ...schemas.errors import StreamrftError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How one row is sampled.

    `temperature` 0 is greedy, and its log-probabilities are those at temperature 1. `top_k` -1
    and `top_p` 1 keep the whole vocabulary. `max_tokens` None takes the model's limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True)
class Request:
    """One row: a prompt, how to sample, and the seed that makes it repeatable."""

    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Generation:
    """What the policy wrote after one prompt; N tokens, the end token included.

    `logprobs` are those of the chosen tokens under the full softmax at the sampling temperature,
    without top_p, top_k or min_tokens, so that a trainer's own log-softmax compares with them.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    branch: str
    finish_reason: Literal["stop", "length"]


class EngineError(StreamrftError):
    """An engine cannot do what was asked."""


class PromptTooLong(EngineError, ValueError):
    """A prompt leaves no room for a single token."""


class WeightsMismatch(EngineError, ValueError):
    """New weights are not those of this model or adapter; another engine has to be opened."""


class Interrupted(EngineError):
    """The engine was asked to stop in the middle of a generation."""


class Engine(Protocol):
    """Serves one version of the policy. Owned by one thread, except `interrupt`."""

    policy_version: int
    branch: str
    max_prompt_tokens: int
    """Longest prompt that leaves room for one token."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Continue each prompt, in order. Blocks until the last row ends.

        A row's result depends on its prompt, sampling and seed and on the weights, never on the
        seeds of its neighbours (float32 log-probabilities may differ in the last digits).

        Raises:
            PromptTooLong: names the row and its length.
            Interrupted: `interrupt` was called.
        """
        ...

    def load_weights(
        self, state_dict: Mapping[str, torch.Tensor], policy_version: int, branch: str
    ) -> None:
        """Serve these weights from the next `generate` on: the model's, or those of its adapter.

        Raises:
            WeightsMismatch: names or shapes differ; nothing was changed.
        """
        ...

    def interrupt(self) -> None:
        """From any thread: let a running or later `generate` raise Interrupted soon."""
        ...


def seed_of(run_seed: int, group_id: str, slot: int, turn: int) -> int:
    """64-bit seed of one generation, the same whoever executes it and when.

    Source: BLAKE2b, RFC 7693, with a digest of 8 bytes.
    """
    text = f"{run_seed}\x00{group_id}\x00{slot}\x00{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def open_engine(engine_type: str, folder: str, **options: Any) -> Engine:
    """The engine of this name over a model folder; `adapter` in the options is one of peft's.

    Raises:
        EngineError: no such engine in this version.
    """
    if engine_type == "transformers":
        from .transformers_engine import TransformersEngine

        return TransformersEngine(folder, **options)
    raise EngineError(
        f"explorer.rollout_model.engine_type {engine_type!r} is not available in this version; "
        "use transformers"
    )
