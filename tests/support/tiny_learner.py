"""A learner of the tiny model, and batches whose log-probs can be computed one by one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrft.consumers.learning.examples import TrainingExample, TrainingSequence
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import AlgorithmSettings, OptimizerSettings, TrainerSettings


def learner(folder: Path, **changes: Any) -> Learner:
    return Learner(learner_settings(folder, **changes), total_steps=None)


def learner_settings(
    folder: Path, *, lr: float = 1e-3, warmup: int = 0, **changes: Any
) -> TrainerSettings:
    keys = {f.name for f in dataclasses.fields(AlgorithmSettings)}
    algorithm = {k: changes.pop(k) for k in keys & changes.keys()}
    return TrainerSettings(
        model_path=str(folder),
        checkpoint_uri="unused",
        algorithm=AlgorithmSettings(
            optimizer=OptimizerSettings(lr=lr, lr_warmup_steps=warmup), **algorithm
        ),
        **changes,
    )


def group(
    masks: Sequence[Sequence[int]], rewards: tuple[float, ...], *, seed: int = 0, **changes: Any
) -> list[TrainingExample]:
    """One group with random tokens; temperature 0.8 in slot 0, else 1."""
    rng = np.random.default_rng(seed)
    return [
        TrainingExample(
            trajectory_id=f"g.{seed}:{i}:a",
            group_id=f"g.{seed}",
            slot=i,
            number=seed,
            sequences=(
                TrainingSequence(
                    rng.integers(7, 263, len(mask)).astype(np.int32),
                    np.array(mask, np.uint8),
                    np.zeros(len(mask), np.float32),
                    0.8 if i == 0 else 1.0,
                ),
            ),
            reward=rewards[i],
            group_rewards=rewards,
            group_slot_index=i,
            reward_parts={"accuracy": rewards[i]},
            **changes,
        )
        for i, mask in enumerate(masks)
    ]


def plain_logprobs(model: Any, sequence: TrainingSequence) -> torch.Tensor:
    """Log-probs of a sequence run alone, float32 [T], 0 for the first token."""
    ids = torch.from_numpy(sequence.tokens.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1] / sequence.temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def with_logprobs(
    examples: list[TrainingExample], model: Any, shifts: Sequence[float] | None = None
) -> list[TrainingExample]:
    """The same with the model's own log-probs as behaviour, less a shift an example."""
    result: list[TrainingExample] = []
    for example, shift in zip(examples, shifts or [0.0] * len(examples), strict=True):
        sequences = tuple(
            dataclasses.replace(
                s,
                logprobs=(plain_logprobs(model, s).detach().numpy() - np.float32(shift))
                * s.loss_mask,
            )
            for s in example.sequences
        )
        result.append(dataclasses.replace(example, sequences=sequences))
    return result


def mixed(seed: int = 3) -> list[TrainingExample]:
    """Three groups of four, lengths 4 to 40, masks with holes."""
    rng = np.random.default_rng(seed)
    examples: list[TrainingExample] = []
    for g in range(3):
        masks = [(rng.random(rng.integers(4, 40)) < 0.6).astype(int).tolist() for _ in range(4)]
        rewards = tuple(float(r) for r in rng.normal(size=4))
        examples += group(masks, rewards, seed=g)
    return examples


def weights_of(one: Learner) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(one.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
