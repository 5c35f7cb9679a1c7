"""The families of functions that make an algorithm.

No torch here: a configuration can be read before torch is imported. `build.py` imports what fills
the registries.
"""

from __future__ import annotations

from typing import Any

from ...streams.registry import Registry

ADVANTAGES: Registry[Any] = Registry("algorithm.advantage_fn")
POLICY_LOSSES: Registry[Any] = Registry("algorithm.policy_loss_fn")
KL_LOSSES: Registry[Any] = Registry("algorithm.kl_loss_fn")
ENTROPY_LOSSES: Registry[Any] = Registry("algorithm.entropy_loss_fn")
AGGREGATIONS: Registry[Any] = Registry("algorithm.loss_agg_mode")
