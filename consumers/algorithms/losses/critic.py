"""What a critic is to learn."""

from __future__ import annotations

import torch
from torch import Tensor


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float = 0.5
) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, one a trained token.

    Args:
        values: [N] of the critic that is trained; carries the gradient.
        old_values: [N] of the critic when the advantages were computed.
        returns: [N], advantage before whitening plus old value.
        cliprange_value: c, veRL's default.

    Source: the clipped value loss of PPO's code, Engstrom et al., arXiv:2005.12729.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2
