"""Answers behind prompts that they are no answers to: what KTO's baseline is measured on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .examples import Floats, TrainingExample, TrainingSequence


def mismatched(
    examples: Sequence[TrainingExample], *, max_tokens: int | None = None
) -> list[TrainingExample]:
    """Every prompt with another prompt's answer; of one prompt alone, none.

    Each takes the answer that stands as many places before it as the largest group has members,
    around the batch: of rows that is the one before. A prompt ends before the first trained token.

    Args:
        examples: groups side by side, each example with a trained token.
        max_tokens: what comes out longer is cut at the end.

    Source: KTO, arXiv:2402.01306, section 4.2; TRL's KTOTrainer takes the same neighbour.
    """
    parts = [(e, s) for e in examples for s in e.sequences if s.is_trained.any()]
    step = max(Counter(e.group_id for e, _ in parts).values(), default=0)
    made: list[TrainingExample] = []
    for i, (example, asked) in enumerate(parts):
        other, answered = parts[(i - step) % len(parts)]
        sequence = _joined(asked, answered, max_tokens)
        if other.group_id != example.group_id and sequence.is_trained.any():
            made.append(dataclasses.replace(example, sequences=(sequence,)))
    return made


def sequence_sums(examples: Sequence[TrainingExample], values: Floats) -> Floats:
    """Sum over each example of `values` [N] at its trained tokens -> [M]; none has 0 of them."""
    counts = np.array([e.num_trained_tokens for e in examples], np.int64)
    return np.add.reduceat(values, np.cumsum(counts) - counts) if len(counts) else values


def _joined(
    asked: TrainingSequence, answered: TrainingSequence, max_tokens: int | None
) -> TrainingSequence:
    prompt = asked.tokens[: int(np.argmax(asked.is_trained))]
    start = int(np.argmax(answered.is_trained))
    tokens = np.concatenate([prompt, answered.tokens[start:]])[:max_tokens]
    mask = np.concatenate([np.zeros(len(prompt), np.uint8), answered.loss_mask[start:]])
    return TrainingSequence(
        tokens,
        mask[:max_tokens],
        np.zeros(len(tokens), np.float32),
        temperature=answered.temperature,
    )
