"""Events as JSON for people: readable, and refused with the place when written wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from streamrft.schemas import events, plain
from streamrft.schemas.errors import InvalidEvent

TRAJECTORY: dict[str, Any] = {
    "trajectory_id": "g.1:0:a",
    "group_id": "g.1",
    "slot": 0,
    "attempt": "a",
    "producer": "import",
    "branch": "main",
    "min_policy_version": 3,
    "max_policy_version": 4,
    "group_size": 1,
    "sequences": [
        {
            "tokens": [5, 6, 7],
            "loss_mask": [0, 1, 1],
            "logprobs": [0, -0.5, -0.25],
            "policy_versions": [[3, 1], [4, 1]],
        }
    ],
    "finish_reason": "stop",
    "reward_sources": {"human": 1.0},
    "produced_at": 1,
}


def with_sequence(**changes: Any) -> dict[str, Any]:
    return TRAJECTORY | {"sequences": [TRAJECTORY["sequences"][0] | changes]}


def test_arrays_are_written_and_shown_as_lists():
    event = plain.from_plain(events.Trajectory, TRAJECTORY)
    assert event.sequences[0].num_tokens == 3
    shown = plain.to_plain(event)
    assert shown["sequences"][0]["tokens"] == [5, 6, 7]
    assert shown["sequences"][0]["policy_versions"] == [[3, 1], [4, 1]]
    assert plain.from_plain(events.Trajectory, shown) == event


def test_bytes_without_a_shape_are_base64():
    letter = events.DeadLetter(
        topic="t",
        partition=0,
        offset=1,
        key=None,
        value=b"\xff",
        headers={},
        error="e",
        reader="r",
        produced_at=1,
    )
    shown = plain.to_plain(letter)
    assert shown["value"] == "/w=="
    assert plain.from_plain(events.DeadLetter, shown) == letter


@pytest.mark.parametrize(
    ("written", "match"),
    [
        (TRAJECTORY | {"colour": 1}, "unknown field 'colour'; it has trajectory_id"),
        (with_sequence(colour=1), "unknown field 'colour'; it has tokens"),
        ({k: v for k, v in TRAJECTORY.items() if k != "slot"}, "missing required field `slot`"),
        (TRAJECTORY | {"slot": "0"}, r"Expected `int`, got `str` - at `\$.slot`"),
        (with_sequence(tokens=[5, 6.5, 7]), "Sequence: tokens holds values that do not fit int32"),
        (with_sequence(tokens=["5", "6", "7"]), "tokens holds values that do not fit"),
        (with_sequence(tokens=[5, 2**40, 7]), "tokens holds values that do not fit"),
        (with_sequence(tokens=[5, 2**80, 7]), "Trajectory: "),
        (with_sequence(loss_mask=[0, 1, 300]), "loss_mask holds values that do not fit uint8"),
        (with_sequence(logprobs=[0, -1e300, 0]), "Trajectory: overflow"),
        (with_sequence(tokens=[[5], [6, 7]]), "Trajectory: "),
        (with_sequence(policy_versions=[3, 2, 4]), "pairs"),
        (with_sequence(logprobs=[0, -0.5]), "logprobs 2"),
        (["no", "object"], "Trajectory: "),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_json_names_the_place(written, match):
    with pytest.raises(InvalidEvent, match=match):
        plain.from_plain(events.Trajectory, written)
