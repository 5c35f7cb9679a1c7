"""One training sequence as it grows: what was shown, what the policy wrote, never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...schemas import arrays
from ...schemas import events as ev
from ..engines.engine import Generation
from .chat import Prompt


class Transcript:
    """Tokens in the order in which the engine saw and wrote them."""

    def __init__(self, prompt: Prompt) -> None:
        self._tokens: list[npt.ArrayLike] = [prompt.tokens]
        self._written: list[tuple[int, Generation]] = []
        self._turns = list(prompt.turns)
        self._length = len(prompt.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All so far: the prompt of the next generation."""
        return tuple(int(t) for part in self._tokens for t in np.asarray(part).tolist())

    def show(self, tokens: Sequence[int], *, role: str, text: str) -> None:
        """Add what the policy did not write, such as a tool's answer."""
        self._add(tokens, len(tokens), role, text)

    def write(self, generation: Generation, text: str) -> None:
        """Add what the policy wrote."""
        self._written.append((self._length, generation))
        self._add(generation.tokens, len(generation.tokens), "assistant", text)

    def sequence(self, temperature: float) -> ev.Sequence:
        """As an event, T tokens long. Greedy sampling (0) refers to temperature 1."""
        tokens = np.concatenate([np.asarray(p, dtype=np.int32) for p in self._tokens])
        mask = np.zeros(len(tokens), dtype=np.uint8)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        for start, generation in self._written:
            part = slice(start, start + len(generation.tokens))
            mask[part], logprobs[part] = 1, generation.logprobs
        versions = [g.policy_versions for _, g in self._written]
        return ev.Sequence(
            tokens=arrays.pack_ints(tokens),
            loss_mask=arrays.pack_mask(mask),
            logprobs=arrays.pack_floats(logprobs),
            policy_versions=arrays.pack_runs(np.concatenate(versions)) if versions else b"",
            temperature=temperature or 1.0,
            truncated=bool(self._written) and self._written[-1][1].finish_reason == "length",
            turns=self._turns,
        )

    def _add(self, tokens: npt.ArrayLike, length: int, role: str, text: str) -> None:
        self._tokens.append(tokens)
        start, self._length = self._length, self._length + length
        self._turns.append(ev.Turn(role=role, start=start, end=self._length, text=text))
