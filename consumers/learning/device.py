"""One micro-batch as tensors on the device, and what the loss functions see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..algorithms.tokens import Tokens
from .batches import FlatBatch, Indices, MicroBatch
from .objective import Objective


class DeviceBatch:
    """One micro-batch on the device; shapes as in MicroBatch."""

    def __init__(self, micro: MicroBatch, flat: FlatBatch, device: torch.device) -> None:
        self._trained, self._device, self._num_rows = micro.trained, device, len(micro.input_ids)
        self._flat = flat
        self.input_ids = self._move(micro.input_ids)
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
