"""What the learner is fed: experiences of the log, or rows to imitate, as plain NumPy arrays.

T is the number of tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...schemas import arrays
from ...schemas.errors import InvalidEvent
from ...schemas.events import Experience, Trajectory

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence of tokens as the engine saw and wrote it.

    Args:
        tokens: int32 [T].
        loss_mask: uint8 [T], 1 where the token is trained on.
        logprobs: float32 [T] of the behaviour policy at `temperature`, 0 where it wrote nothing.
        temperature: divides the logits before the log-softmax.
        is_truncated: the engine stopped at the length limit.
        current_logprobs: float32 [T] of the policy before the step; like the following, None
            until somebody measured it, and 0 at tokens that are not trained.
        entropies: float32 [T] of the policy before the step.
        expected_signals: float32 [T], its mean of p (H + log p). See advantages/entropy_clip.py.
        ref_logprobs: float32 [T] of the reference model.
        teacher_logprobs: float32 [T] of a teacher; `values`: float32 [T] of a critic.
        correction: float32 [T], what the token's policy loss is multiplied by; None for 1.
    """

    tokens: Ints
    loss_mask: Mask
    logprobs: Floats
    temperature: float = 1.0
    is_truncated: bool = False
    current_logprobs: Floats | None = None
    entropies: Floats | None = None
    expected_signals: Floats | None = None
    ref_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    values: Floats | None = None
    correction: Floats | None = None

    @property
    def is_trained(self) -> npt.NDArray[np.bool_]:
        """Bool [T]: the mask without the first token, which nothing predicts."""
        mask = self.loss_mask.astype(bool)
        mask[:1] = False
        return mask


@dataclass(frozen=True)
class TrainingExample:
    """One experience, or one row of supervised text.

    Args:
        slot: its place in the group; `number`: publication number of the task.
        reward: total reward; `reward_parts` holds the unweighted value by source.
        group_rewards: total reward of every scored member of the group, itself included.
        group_slot_index: index of its own reward in `group_rewards`, -1 where it has none.
        token_rewards: float32 over the concatenated tokens of all sequences, or None.
        is_expert: an expert wrote it, not the policy; `preference`: 1 wanted, -1 unwanted, 0
            neither, a wanted one being followed by its unwanted partner where they are paired.
        baseline_reward: of the greedy rollout of the same task.
        step_rewards, state_hashes: one a sequence, of an agent's steps.
    """

    trajectory_id: str
    group_id: str
    slot: int
    number: int
    sequences: tuple[TrainingSequence, ...]
    reward: float = 0.0
    group_rewards: tuple[float, ...] = ()
    group_slot_index: int = -1
    min_policy_version: int = 0
    token_rewards: Floats | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    is_expert: bool = False
    preference: int = 0
    baseline_reward: float | None = None
    step_rewards: tuple[float, ...] | None = None
    state_hashes: tuple[str, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with loss_mask 1; the first token of a sequence has no prediction."""
        return sum(int(s.loss_mask[1:].sum()) for s in self.sequences)


def examples_from_experience(experience: Experience, trajectory: Trajectory) -> TrainingExample:
    """The experience with the tokens of its trajectory; a filter's loss mask replaces the recorded.

    Args:
        experience: from the log.
        trajectory: the decoded record, its claim resolved, so that sequences are there.

    Raises:
        InvalidEvent: the override masks or token rewards do not cover the trajectory's tokens.
    """
    num_tokens = sum(s.num_tokens for s in trajectory.sequences)
    _check_length(experience, "loss_mask", experience.loss_mask, 1, num_tokens)
    _check_length(experience, "token_rewards", experience.token_rewards, 4, num_tokens)
    rewards = experience.token_rewards
    return TrainingExample(
        trajectory_id=experience.trajectory_id,
        group_id=experience.group_id,
        slot=experience.slot,
        number=experience.number,
        sequences=_sequences(trajectory, experience.loss_mask),
        reward=experience.reward,
        group_rewards=tuple(m.reward for m in experience.group),
        group_slot_index=_own_index(experience),
        min_policy_version=experience.min_policy_version,
        token_rewards=None if rewards is None else arrays.floats(rewards),
        reward_parts=experience.reward_parts,
    )


def _sequences(trajectory: Trajectory, override: bytes | None) -> tuple[TrainingSequence, ...]:
    sequences: list[TrainingSequence] = []
    start = 0
    for s in trajectory.sequences:
        end = start + s.num_tokens
        mask = s.loss_mask if override is None else override[start:end]
        sequences.append(
            TrainingSequence(
                tokens=arrays.ints(s.tokens),
                loss_mask=arrays.mask(mask),
                logprobs=arrays.floats(s.logprobs),
                temperature=s.temperature,
                is_truncated=s.truncated,
            )
        )
        start = end
    return tuple(sequences)


def _own_index(experience: Experience) -> int:
    own = (i for i, m in enumerate(experience.group) if m.slot == experience.slot)
    return next(own, -1)


def _check_length(
    experience: Experience, name: str, packed: bytes | None, width: int, num_tokens: int
) -> None:
    if packed is not None and len(packed) != width * num_tokens:
        raise InvalidEvent(
            f"experience {experience.trajectory_id}: {name} covers {len(packed) / width:g} "
            f"tokens, the trajectory's sequences have {num_tokens}.",
            field=name,
        )
