"""LoRA adapters through peft, and the weights that they amount to.

y = W x + (alpha / r) B A x, and only A and B are trained (Hu et al. 2021, arXiv:2106.09685,
equation 3). There is no dropout, so that the trainer computes what the engine sampled from, and
quantised base weights are not supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rolltree.errors import ConfigError, did_you_mean
from rolltree.training.ranks import reshard, whole
from rolltree.training.sections import ModelSection

ADAPTER = "default"
_PREFIX = "base_model.model."


def add_adapter(model: Any, section: ModelSection, seed: int) -> None:
    """Put adapters on the linear layers that `section` names; nothing else trains from then on.

    The same seed gives the same adapters. B starts at 0, so the model computes what it did.

    Raises:
        ConfigError: peft is missing, or a target is not a linear layer of this model.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            "model.lora_rank is set, and adapters need the package peft, which is not installed. "
            "Install it: pip install 'rolltree[train]'"
        ) from error
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    }
    for target in section.lora_targets:
        if target not in linear:
            raise ConfigError(
                f"model.lora_targets has {target!r}, which is not a linear layer of "
                f"{type(model).__name__}.{did_you_mean(target, linear)}"
            )
    config: Any = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha or 2 * section.lora_rank,  # type: ignore[arg-type]
        target_modules=sorted(section.lora_targets or linear),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(config, ADAPTER)
    model.eval()


def is_adapted(model: Any) -> bool:
    """Whether `add_adapter` was called on a model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Let `model` compute what it did before `add_adapter` while the context is open.

    The adapters' scale is 0 in it: nothing of the module changes but that number, so shards and
    what autograd has recorded stay as they are.
    """
    scales = [module.scaling for module in model.modules() if hasattr(module, "base_layer")]
    before = [scale[ADAPTER] for scale in scales]
    try:
        for scale in scales:
            scale[ADAPTER] = 0.0
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale[ADAPTER] = value


def peft_name(name: str) -> str:
    """Return what peft's files call an adapter's parameter.

    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


@torch.no_grad()
def plain_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers as a model without adapters and ranks has them.

    Tied parameters come once; adapters are added to the weights below them; shards are gathered,
    one tensor at a time. Every rank goes through all of it.
    """
    reshard(model)
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and ADAPTER in getattr(module, "lora_A", {})
    }
    saved = set(model.state_dict(keep_vars=True))
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    for name, tensor in named:
        if ".lora_" in name:
            continue
        value = whole(tensor)
        if name in adapted:
            module = adapted[name]
            down, up = (whole(part[ADAPTER].weight) for part in (module.lora_A, module.lora_B))
            value = value + module.scaling[ADAPTER] * (up @ down).to(value.dtype)
        yield name.replace(".base_layer.", "."), value


@torch.no_grad()
def copy_weights(model: Any, served: Any | None) -> None:
    """Write the weights of `model`, merged and gathered, into the plain module `served`.

    The embedded engine reads the trainer's own tensors; of several ranks those are shards, and with
    adapters not the weights to sample from, so it reads such a copy. Every rank calls it; those
    without a copy pass None.
    """
    targets: dict[str, Tensor] = {}
    if served is not None:
        targets = {**dict(served.named_parameters()), **dict(served.named_buffers())}
    for name, value in plain_tensors(model):
        if served is not None:
            targets[name].copy_(value)
