from __future__ import annotations

import numpy as np
import pytest

from streamrft.consumers.learning.examples import examples_from_experience
from streamrft.schemas import arrays
from streamrft.schemas.errors import InvalidEvent
from streamrft.schemas.events import Experience, GroupMember, Sequence, Trajectory


def sequence(tokens: list[int], mask: list[int]) -> Sequence:
    return Sequence(
        tokens=arrays.pack_ints(tokens),
        loss_mask=arrays.pack_mask(mask),
        logprobs=arrays.pack_floats([-0.5 * m for m in mask]),
        policy_versions=arrays.pack_runs([3] * sum(mask)),
        temperature=0.7,
    )


TRAJECTORY = Trajectory(
    trajectory_id="t.4:2:a",
    group_id="t.4",
    slot=2,
    attempt="a",
    producer="explorer-0",
    branch="main",
    min_policy_version=3,
    max_policy_version=3,
    group_size=4,
    sequences=[sequence([7, 8, 9], [0, 1, 1]), sequence([5, 6], [0, 1])],
    finish_reason="stop",
    reward_sources={"accuracy": 1.0},
    produced_at=0,
)


def experience(**changes: object) -> Experience:
    fields: dict = dict(
        trajectory_id="t.4:2:a",
        reward_revision=0,
        group_id="t.4",
        slot=2,
        number=4,
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        num_tokens=5,
        num_trained_tokens=3,
        reward=1.0,
        reward_parts={"accuracy": 1.0},
        group=[
            GroupMember(slot=s, trajectory_id=f"t.4:{s}:a", reward=r)
            for s, r in ((0, 0.0), (2, 1.0), (3, 0.5))
        ],
        group_experiences=2,
        trajectory=b"",
        trajectory_partition=0,
        trajectory_offset=0,
        produced_at=0,
    )
    return Experience(**(fields | changes))


def test_an_example_has_the_tokens_that_the_engine_saw():
    example = examples_from_experience(experience(), TRAJECTORY)
    first, second = example.sequences
    assert first.tokens.tolist() == [7, 8, 9] and second.tokens.tolist() == [5, 6]
    assert first.loss_mask.tolist() == [0, 1, 1] and first.temperature == 0.7
    assert first.logprobs.tolist() == [0, -0.5, -0.5]
    assert (example.num_tokens, example.num_trained_tokens) == (5, 3)


def test_an_example_knows_its_place_in_the_whole_group():
    example = examples_from_experience(experience(), TRAJECTORY)
    assert example.group_rewards == (0.0, 1.0, 0.5) and example.group_slot_index == 1
    assert (example.number, example.slot, example.min_policy_version) == (4, 2, 3)


def test_a_filters_loss_mask_replaces_the_recorded_one_across_sequences():
    mask = arrays.pack_mask([0, 1, 0, 0, 0])
    example = examples_from_experience(experience(loss_mask=mask), TRAJECTORY)
    assert [s.loss_mask.tolist() for s in example.sequences] == [[0, 1, 0], [0, 0]]
    mask = arrays.pack_mask([0, 0, 0, 0, 1])
    example = examples_from_experience(experience(loss_mask=mask), TRAJECTORY)
    assert [s.loss_mask.tolist() for s in example.sequences] == [[0, 0, 0], [0, 1]]
    assert example.num_trained_tokens == 1


def test_token_rewards_are_read():
    rewards = arrays.pack_floats([0, 0, 0.25, 0, 0])
    example = examples_from_experience(experience(token_rewards=rewards), TRAJECTORY)
    assert example.token_rewards is not None
    np.testing.assert_array_equal(example.token_rewards, [0, 0, 0.25, 0, 0])


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"loss_mask": b"\0\1"}, "loss_mask covers 2 tokens"),
        ({"token_rewards": arrays.pack_floats([0.0] * 6)}, "token_rewards covers 6 tokens"),
    ],
)
def test_overrides_of_another_length_are_refused(changes: dict, named: str):
    with pytest.raises(InvalidEvent, match=f"t.4:2:a: {named}.*have 5"):
        examples_from_experience(experience(**changes), TRAJECTORY)
