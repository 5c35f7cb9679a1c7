"""One micro-batch as tensors on the device, and what the loss functions see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algorithms.tokens import Tokens
from .batches import FlatBatch, Indices, MicroBatch
from .objective import Objective

# tokens times hidden size of a micro-batch that stays in a CPU's cache: 512 of SmolLM2's tokens,
# which took 1.1 to 1.2 times as long in micro-batches of 2048
CPU_VALUES = 300_000


def token_budget(limit: int, device: torch.device, width: int) -> int:
    """Tokens of a micro-batch for a model of hidden size `width`; never more than `limit`."""
    if device.type != "cpu":
        return limit
    return min(limit, 2048, max(512, CPU_VALUES // width))


class DeviceBatch:
    """One micro-batch on the device; shapes as in MicroBatch."""

    def __init__(self, micro: MicroBatch, flat: FlatBatch, device: torch.device) -> None:
        self._trained, self._device, self._num_rows = micro.trained, device, len(micro.lengths)
        self._flat = flat
        self.input_ids = self._move(micro.input_ids)
        self.lengths: list[int] = micro.lengths.tolist()
        self.predictors, self.targets = self._move(micro.predictors), self._move(micro.targets)
        self.sequence = self._move(micro.sequence)
        self.temperatures = None if micro.temperatures is None else self._move(micro.temperatures)

    def moved(self, values: Any) -> Any:
        """The micro-batch's part [n] of an array [N] over the batch; None stays None."""
        return None if values is None else self._move(values[self._trained])

    def tokens(
        self,
        objective: Objective,
        rows: Indices,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        step: int,
    ) -> Tokens:
        """What the loss functions see; `rows` are the micro-batch's sequences in the batch."""
        preferences = pairs = None
        if objective.preferences is not None:
            preferences = self._move(objective.preferences[rows])
        if objective.is_paired:
            pairs = torch.arange(len(rows), device=self._device) // 2
        is_expert = None
        if objective.is_expert.any():
            is_expert = self._move(objective.is_expert[rows])[self.sequence]
        return Tokens(
            logprobs=logprobs,
            old_logprobs=self.moved(self._flat.old_logprobs),
            advantages=self.moved(objective.advantages),
            sequence=self.sequence,
            num_sequences=self._num_rows,
            ref_logprobs=ref_logprobs,
            is_expert=is_expert,
            preferences=preferences,
            pairs=pairs,
            kl_baseline=objective.kl_baseline,
            step=step,
        )

    def _move(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)
