"""The weights of a model as one without adapters and ranks has them; adapters are `lora`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rolltree.training.models.shards import reshard, whole
from rolltree.values.errors import TrainingError

ADAPTER = "default"
ADAPTER_FILE = "adapter_model.safetensors"


def is_adapted(model: Any) -> bool:
    """Whether a model has adapters, from `add_adapter` or its own."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@torch.no_grad()
def plain_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers as a model without adapters and ranks has them.

    Tied parameters come once; adapters are added to the weights below them; shards are gathered,
    one tensor at a time. Every rank has to iterate to the end.
    """
    # After a forward pass without a backward pass, FSDP leaves the root's parameters gathered.
    reshard(model)
    if is_adapted(model):
        from rolltree.training.models.lora import merged_tensors

        yield from merged_tensors(model)
        return
    for name, tensor in own_tensors(model).items():
        yield name, whole(tensor)


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that a state dict has."""
    # `named_buffers` also lists buffers that no state dict has, such as rotary angles.
    saved = set(model.state_dict(keep_vars=True))
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


@torch.no_grad()
def copy_weights(model: Any, served: Any | None) -> None:
    """Write the weights of `model`, merged and gathered, into the plain module `served`.

    The embedded engine reads the trainer's own tensors, but with several ranks these are shards,
    and with adapters they are not the weights to sample from, so it reads this copy. Every rank
    calls it; ranks without a copy pass None.

    Raises:
        TrainingError: the copy has different tensors, so a part of it would stay as it was.
    """
    targets = {} if served is None else own_tensors(served)
    left = set(targets)
    for name, value in plain_tensors(model):
        # Ranks without a copy still take part in gathering each tensor.
        if served is None:
            continue
        if name not in targets or targets[name].shape != value.shape:
            raise TrainingError(
                f"the copy of the model that is sampled from has no tensor {name} of shape "
                f"{tuple(value.shape)}, so it would not compute what is trained. It must be a copy "
                "of the model as it was loaded."
            )
        targets[name].copy_(value)
        left.discard(name)
    if left:
        raise TrainingError(
            f"{len(left)} tensors of the copy that is sampled from, {min(left)} among them, are "
            "not among the trained model's, so they would stay as they are. It must be a copy of "
            "the model as it was loaded."
        )
