"""One model over several ranks: FSDP2 (`fully_shard`), and its tensors whole again.

Parameters, gradients and optimizer state are DTensors cut along their first dimension; each layer
is gathered when it computes (Zhao et al. 2023, arXiv:2304.11277). Gradients are summed over ranks,
not averaged: losses carry global normalizers. It knows modules and ranks. It leaves out tensor and
pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rolltree.training.forward import LogprobModel
from rolltree.training.ranks import Ranks

_METHOD = "rolltree_logprobs"


def shard(logprobs: LogprobModel, ranks: Ranks) -> None:
    """Shard the module of `logprobs` in place, and let `logprobs` compute with it.

    Each decoder layer is gathered on its own; everything else, tied embeddings and output head
    included, is one more group. Master weights stay as they are (float32); with another
    `compute_dtype` they are gathered in it, and gradients are summed in float32.
    """
    model, dtype = logprobs.model, logprobs.compute_dtype
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for module in (*layers, model):
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    setattr(model, _METHOD, logprobs.compute)
    register_fsdp_forward_method(model, _METHOD)
    logprobs.run = getattr(model, _METHOD)
    logprobs.device = ranks.device


def reshard(model: torch.nn.Module) -> None:
    """Let parameters be shards again: after a pass without a backward one the root's are whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its parts, without gradient; every rank calls it alike."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what this rank holds of a tensor, sharing memory, and where it lies in the whole."""
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
    norm: Any = torch.nn.utils.get_total_norm(list(gradients))
    return float(whole(norm))
