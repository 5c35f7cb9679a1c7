"""What a closing group needs of its trajectories, in a bounded cache beside the join's state."""

from __future__ import annotations

import msgspec

from ..schemas import codec
from ..schemas.events import Sequence, Trajectory
from .blobs import resolve

_OVERHEAD_BYTES = 1024


class Payload(msgspec.Struct, gc=False):
    """A trajectory's record value with the header fields that an experience repeats.

    `lengths`: tokens a sequence; `headers`: trace context, passed on to the experience.
    """

    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    branch: str
    min_policy_version: int
    max_policy_version: int
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    num_trained_tokens: int
    metrics: dict[str, float]
    claimed: list[Sequence] | None = None

    @classmethod
    def of(
        cls, value: bytes, trajectory: Trajectory, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> Payload:
        """From a record value and its decoded trajectory.

        Raises:
            StorageUnavailable, StorageCorrupt: the tokens lie beside the log and cannot be had.
        """
        is_claimed = trajectory.claim is not None
        trajectory = resolve(trajectory)
        sequences = trajectory.sequences
        return cls(
            value,
            headers,
            trajectory.branch,
            trajectory.min_policy_version,
            trajectory.max_policy_version,
            tuple([s.num_tokens for s in sequences]),
            tuple([s.truncated for s in sequences]),
            sum([s.loss_mask.count(1) for s in sequences]),
            trajectory.metrics,
            sequences if is_claimed else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(self.lengths)

    @property
    def size_bytes(self) -> int:
        """What it costs the cache, about."""
        claimed = sum(9 * s.num_tokens for s in self.claimed or ())
        return len(self.value) + claimed + _OVERHEAD_BYTES

    def sequences(self) -> list[Sequence]:
        """The sequences, decoded again: only few operators look at tokens."""
        if self.claimed is not None:
            return self.claimed
        return codec.decode(self.value, Trajectory).sequences


class PayloadCache:
    """Payloads by offset, the oldest given up when the bound is passed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.size_bytes = max_bytes, 0
        self._held: dict[int, Payload] = {}

    def put(self, offset: int, payload: Payload) -> None:
        """Hold a payload."""
        self.discard(offset)
        self._held[offset] = payload
        self.size_bytes += payload.size_bytes
        while self.size_bytes > self.max_bytes and len(self._held) > 1:
            self.discard(next(iter(self._held)))

    def get(self, offset: int) -> Payload | None:
        """The payload, when it is still held."""
        return self._held.get(offset)

    def discard(self, offset: int) -> None:
        """Let go of a payload."""
        payload = self._held.pop(offset, None)
        if payload is not None:
            self.size_bytes -= payload.size_bytes
