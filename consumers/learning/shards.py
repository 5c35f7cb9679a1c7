"""A model and its optimiser in shards, one a rank: sharded, gathered and scattered again.

FSDP2: each rank holds a part of every weight, its gradient and its moments; a layer is gathered
for its pass. Every function here is called by all ranks, in the same order.
Source: PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from .ranks import Ranks


def shard(network: Any, mesh: DeviceMesh) -> None:
    """Shard each of the model's blocks, then the rest; gradients are added up, not averaged."""
    blocks = set(getattr(network, "_no_split_modules", None) or ())
    for module in list(network.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    # the rest holds embeddings and head, which are gathered again for the backward pass
    fully_shard(network, mesh=mesh, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum
    network.gathered_for = lambda call: call()
    register_fsdp_forward_method(network, "gathered_for")


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scattered(values: Tensor | None, like: Tensor) -> Tensor:
    """Rank 0's `values` in shards as `like` is; None on the other ranks."""
    assert isinstance(like, DTensor)
    if values is None:
        values = torch.empty(like.shape, dtype=like.dtype)
    values = values.to(like.device, like.dtype)
    return distribute_tensor(values, like.device_mesh, like.placements)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None, ranks: Ranks
) -> None:
    """Take over the `state_dict` of one process; None on ranks above 0, which get their shards."""
    if ranks.size == 1:
        assert state is not None
        optimizer.load_state_dict(dict(state))
        return
    found = ranks.gathered(None if state is None else outline(state))[0]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in found["state"].items():
        for name, value in values.items():
            if value is None:
                whole_value = None if state is None else state["state"][i][name]
                values[name] = ranks.scattered(whole_value, parameters[i])
    optimizer.load_state_dict(found)


def outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state with None for what lies in shards."""
    moments = {
        i: {name: None if value.ndim else value for name, value in values.items()}
        for i, values in state["state"].items()
    }
    return {**state, "state": moments}
