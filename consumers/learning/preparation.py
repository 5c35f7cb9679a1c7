"""What is done to a batch before its advantages: refused, measured, penalised, corrected.

T tokens of a sequence, N trained tokens of a batch. Every function gives new examples.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..algorithms.advantages import token_rewards
from ..algorithms.correction import RolloutCorrection
from ..algorithms.kl import KlLoss
from ..algorithms.tokens import PolicyLoss
from .examples import TrainingExample, TrainingSequence

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


def chosen_for(loss: PolicyLoss, examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """What of a batch the loss can be computed of, with what is preferred where it compares."""
    if getattr(loss, "is_paired", False):
        examples = whole_pairs(examples)
    elif (threshold := getattr(loss, "reward_threshold", None)) is not None:
        examples = judged(examples, threshold)
    return usable(examples)


def usable(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Those whose reward and log-probs are numbers, their groups without the others' rewards.

    One NaN would reach every weight of the model. A sibling that is left alone is a group of one.
    """
    kept: list[TrainingExample] = []
    for example in examples:
        rewards = example.group_rewards
        if not _is_finite(example):
            continue
        if all(map(math.isfinite, rewards)):
            kept.append(example)
            continue
        index = example.group_slot_index
        if index >= 0:
            index = sum(map(math.isfinite, rewards[:index]))
        finite = tuple(filter(math.isfinite, rewards))
        kept.append(dataclasses.replace(example, group_rewards=finite, group_slot_index=index))
    return kept


def _is_finite(example: TrainingExample) -> bool:
    arrays = [s.logprobs for s in example.sequences]
    if example.token_rewards is not None:
        arrays.append(example.token_rewards)
    return math.isfinite(example.reward) and all(bool(np.isfinite(a).all()) for a in arrays)


def whole_pairs(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Pairs of which both sides are usable and have a trained token, the wanted side first.

    Of rollouts the first side of a pair is the wanted one, as the source puts it.
    """
    assert len(examples) % 2 == 0, "pairs stand side by side"
    pairs = zip(examples[0::2], examples[1::2], strict=True)
    return [
        dataclasses.replace(e, preference=preference)
        for pair in pairs
        if all(x.num_trained_tokens and _is_finite(x) for x in pair)
        for e, preference in zip(pair, (1, -1), strict=True)
    ]


def judged(examples: Sequence[TrainingExample], threshold: float) -> list[TrainingExample]:
    """Rollouts with a reward above the threshold wanted, the others not; rows say it themselves."""
    return [
        e if e.preference else dataclasses.replace(e, preference=1 if e.reward > threshold else -1)
        for e in examples
    ]


def refilled(
    kept: Sequence[tuple[TrainingExample, T]], num_groups: int
) -> list[tuple[TrainingExample, T]]:
    """What was kept of a batch, and copies of random groups of it until there are `num_groups`.

    Rows of an expert are no groups. Which ones is a function of the ids alone, so that a cut
    trained again copies the same.
    """
    groups: dict[str, list[tuple[TrainingExample, T]]] = {}
    for example, value in kept:
        if not example.is_expert:
            groups.setdefault(example.group_id, []).append((example, value))
    if not groups:
        return list(kept)
    chance = np.random.RandomState(zlib.crc32(" ".join(groups).encode()))
    members = list(groups.values())
    copies = chance.choice(len(members), num_groups - len(members))
    return [*kept, *(pair for i in copies for pair in members[i])]


def with_measured(
    examples: Sequence[TrainingExample], measured: Mapping[str, Floats]
) -> list[TrainingExample]:
    """The examples with fields of their sequences filled in.

    Args:
        examples: a batch.
        measured: field of TrainingSequence -> float32 [N] at the batch's trained tokens in order.
    """
    start = 0
    result: list[TrainingExample] = []
    for example in examples:
        sequences: list[TrainingSequence] = []
        for sequence in example.sequences:
            places = np.flatnonzero(sequence.is_trained)
            fields = {
                name: _placed(len(sequence.tokens), places, values[start : start + len(places)])
                for name, values in measured.items()
            }
            sequences.append(dataclasses.replace(sequence, **fields))
            start += len(places)
        result.append(dataclasses.replace(example, sequences=tuple(sequences)))
    return result


def penalised(
    examples: Sequence[TrainingExample], kl: KlLoss, coef: float
) -> tuple[list[TrainingExample], dict[str, float]]:
    """Each token's reward less coef times its KL to the reference, and the rewards that follow.

    The KL is that of the recorded log-probs to ref_logprobs. Siblings in the batch are compared
    by their penalised rewards too. Source: RLHF, arXiv:1909.08593; InstructGPT, arXiv:2203.02155.
    """
    if not examples:
        return [], {}
    changed: list[TrainingExample] = []
    totals: list[float] = []
    for example in examples:
        if example.is_expert:
            changed.append(example)
            continue
        penalties = [coef * _divergence(s, kl) for s in example.sequences]
        places = np.concatenate([s.is_trained for s in example.sequences])
        rewards = np.zeros(len(places))
        rewards[places] = token_rewards(example)
        rewards -= np.concatenate(penalties)
        totals.append(float(np.concatenate(penalties).sum()))
        reward = example.reward - totals[-1]
        tokens = rewards.astype(np.float32)
        changed.append(dataclasses.replace(example, reward=reward, token_rewards=tokens))
    num_tokens = max(1, sum(e.num_trained_tokens for e in examples if not e.is_expert))
    mean = sum(totals) / coef / num_tokens
    return _regrouped(changed), {"critic/kl": mean, "critic/kl_coeff": coef}


def _divergence(sequence: TrainingSequence, kl: KlLoss) -> npt.NDArray[np.float64]:
    """KL [T], 0 at tokens that are not trained."""
    assert sequence.ref_logprobs is not None
    old = torch.from_numpy(sequence.logprobs)
    values = kl(old, torch.from_numpy(sequence.ref_logprobs), old).double().numpy()
    return np.where(sequence.is_trained, values, 0.0)


def _regrouped(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    rewards = {(e.group_id, e.group_slot_index): e.reward for e in examples}
    return [
        dataclasses.replace(
            e,
            group_rewards=tuple(
                rewards.get((e.group_id, i), r) for i, r in enumerate(e.group_rewards)
            ),
        )
        for e in examples
    ]


def corrected(
    examples: Sequence[TrainingExample], correction: RolloutCorrection
) -> tuple[list[TrainingExample], dict[str, float]]:
    """The examples with weights and masks from current_logprobs against the recorded ones.

    An expert's tokens keep weight 1 and are not counted: nobody recorded how likely they were.
    """
    own = [s for e in examples if not e.is_expert for s in e.sequences]
    outcome = correction([_log_ratio(s) for s in own])
    made = map(_applied, own, outcome.weights, outcome.kept)
    result = [
        dataclasses.replace(
            e, sequences=tuple(_uncorrected(s) if e.is_expert else next(made) for s in e.sequences)
        )
        for e in examples
    ]
    return result, dict(outcome.metrics)


def _uncorrected(sequence: TrainingSequence) -> TrainingSequence:
    return dataclasses.replace(sequence, correction=np.ones(len(sequence.tokens), np.float32))


def _log_ratio(sequence: TrainingSequence) -> npt.NDArray[np.float64]:
    assert sequence.current_logprobs is not None
    difference = sequence.current_logprobs.astype(np.float64) - sequence.logprobs
    return difference[sequence.is_trained]


def _applied(
    sequence: TrainingSequence,
    weights: npt.NDArray[np.float64],
    kept: npt.NDArray[np.bool_],
) -> TrainingSequence:
    places = np.flatnonzero(sequence.is_trained)
    mask = np.zeros(len(sequence.tokens), np.uint8)
    mask[places[kept]] = 1
    return dataclasses.replace(
        sequence, loss_mask=mask, correction=_placed(len(mask), places, weights)
    )


def _placed(length: int, places: npt.NDArray[np.int64], values: npt.NDArray) -> Floats:
    """Zeros [length] with `values` at `places`."""
    array = np.zeros(length, np.float32)
    array[places] = values
    return array
