"""Rollouts as explorers publish them, for what is measured over events."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrft.schemas import arrays
from streamrft.schemas import events as ev

GROUP = 8


def trajectory(
    number: int, slot: int, sequence: ev.Sequence, *, attempt: str = "a1", **fields: Any
) -> ev.Trajectory:
    """One rollout of a group of eight; `fields` says what it was scored with and by whom."""
    group_id = f"bench.{number}"
    return ev.Trajectory(
        trajectory_id=f"{group_id}:{slot}:{attempt}",
        group_id=group_id,
        slot=slot,
        attempt=attempt,
        number=number,
        taskset="bench",
        row=number,
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=GROUP,
        sequences=[sequence],
        finish_reason="stop",
        metrics={"response_length": float(sequence.num_tokens)},
        produced_at=ev.now_ms(),
        **fields,
    )


def sequence_of(num_tokens: int) -> ev.Sequence:
    """A sequence of which the policy wrote three quarters."""
    rng = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return ev.Sequence(
        tokens=arrays.pack_ints(rng.integers(0, 50_000, num_tokens)),
        loss_mask=arrays.pack_mask(mask),
        logprobs=arrays.pack_floats(np.where(mask, -rng.random(num_tokens), 0.0)),
        policy_versions=arrays.pack_runs([3] * int(mask.sum())),
    )
