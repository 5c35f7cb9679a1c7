"""How much the spread of the policy counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .registry import ENTROPY_LOSSES


@ENTROPY_LOSSES.register("default")
@dataclass(frozen=True)
class EntropyBonus:
    """The loss falls by entropy_coef times the entropy a token, aggregated as the policy loss.

    With coefficient 0, Trinity's default, the entropy is not computed. Source: A3C,
    arXiv:1602.01783.
    """

    entropy_coef: float = 0.0
    skips_experts = False

    @property
    def is_active(self) -> bool:
        """Whether entropies are needed."""
        return self.entropy_coef != 0


@ENTROPY_LOSSES.register("mix")
@dataclass(frozen=True)
class OwnEntropyBonus(EntropyBonus):
    """The same at the policy's own tokens only, none at those that an expert wrote."""

    skips_experts = True


@ENTROPY_LOSSES.register("none")
def none(**ignored: Any) -> EntropyBonus:
    """No entropy term."""
    return EntropyBonus(0.0)
