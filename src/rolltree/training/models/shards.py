"""Tensors that may be shards: the whole of one, this rank's part, and the norm of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def reshard(model: torch.nn.Module) -> None:
    """Shard parameters again: a forward pass without a backward pass leaves the root's whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, without gradient; every rank has to call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, sharing memory, and its place in the whole."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    spans = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    return tensor.to_local(), spans


def total_norm(gradients: Iterable[Tensor]) -> float:
    """Return the norm of all gradients of all ranks together."""
    # For shards it is a DTensor, whose parts are on the ranks.
    norm: Any = torch.nn.utils.get_total_norm(list(gradients))
    return float(whole(norm))
