"""AdamW under the configured schedule and clip: the policy's, and a critic's with the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..settings import OptimizerSettings
from . import schedules, shards
from .ranks import Ranks

logger = logging.getLogger("streamrft")


@dataclass(frozen=True)
class Update:
    """What became of one gradient: its norm before the clip, and whether it was applied."""

    grad_norm: float
    lr: float
    is_applied: bool


class ScheduledAdamW:
    """One model's AdamW. All ranks call its methods together, each for its shards."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Tensor],
        settings: OptimizerSettings,
        *,
        total_steps: int | None,
        ranks: Ranks,
    ) -> None:
        """`name` of the model, for people; `settings` were checked by `schedules.check`."""
        self._name, self._settings, self._total_steps = name, settings, total_steps
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._ranks = ranks
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def kept(self) -> dict[str, Any]:
        """Plain values that are saved with the moments; others may add their own."""
        return self._adamw.param_groups[0]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def update(self, step: int, *, has_loss: bool = True) -> Update:
        """Clip and apply the gradient, unless there is none or it is not finite; then forget it."""
        lr = schedules.learning_rate(self._settings, step, self._total_steps)
        clip = self._settings.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip if clip > 0 else math.inf)
        norm = float(shards.whole(norm))
        is_applied = has_loss and math.isfinite(norm)
        if is_applied:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        elif has_loss:
            logger.warning(
                "step %d: the %s's gradient norm is %s, its update is skipped",
                step,
                self._name,
                norm,
            )
        self.zero_grad()
        return Update(norm, lr, is_applied)

    def state(self) -> dict[str, Any]:
        """Of one process, for torch.save; several save `moments` and `outline`."""
        return self._adamw.state_dict()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Undo `state` on any number of ranks; None on those above 0, which get their shards."""
        shards.load_optimizer_state(self._adamw, state, self._ranks)

    def outline(self) -> dict[str, Any]:
        """What is not sharded: `state` with None for each moment."""
        return shards.outline(self._adamw.state_dict())

    def moments(self, outline: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """This rank's part of each moment, `<parameter>.<moment>`.

        With an outline, what has the shape and place of each moment that it names.
        """
        found = self._adamw.state_dict() if outline is None else outline
        return {
            f"{self._names[i]}.{name}": self._parameters[i] if v is None else v
            for i, values in found["state"].items()
            for name, v in values.items()
            if v is None or v.ndim
        }

    def load_outline(self, outline: Mapping[str, Any]) -> None:
        """Take over what `outline` gave; the moments are 0 until they are filled (`moments`)."""
        moments = {
            i: {
                name: torch.zeros_like(self._parameters[i]) if value is None else value
                for name, value in values.items()
            }
            for i, values in outline["state"].items()
        }
        self._adamw.load_state_dict({**outline, "state": moments})
