"""A model's body, and copies of a model: shells that share its tensors, and trial copies.

A shell shares the trainer's weights but not its mode (dropout, gradient checkpointing, attention
kernel), nor the rotary angles that its last sequence left. A trial copy has weights moved away from
initialisation, large logits and short windows, so that a few tokens show everything that its layers
do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from typing import Any

import torch

# The window and chunk of a trial copy, in tokens, if the model's own are longer.
SHORT = 8
# Settings that matter only for tokens further than this from each other, or from the start.
_WINDOWS = (
    *("sliding_window", "attention_chunk_size", "floor_scale", "window_size"),
    *("attention_window_size", "keep_window_size", "index_topk"),
)
# Names of a model's cache, in its arguments and in its output. transformers 5.24 calls both `cache`
# and warns of the names before it, so these are tried last.
_CACHE_NAMES = ("cache", "state", "mems", "past_key_values", "cache_params")
MOVING_ROPE = ("dynamic", "longrope")
_FULL_COPY_BYTES = 2**31
_SMALL = 2**16
_LARGE_LOGIT = 40.0
# Random numbers are drawn once and repeated. A prime, so that the rows of a matrix differ.
_NUM_DRAWN = 1_000_003
# The distance between the beginnings of successive tensors in them.
_STRIDE = 7919


def body_name(model: Any) -> str | None:
    """Return the name of the attribute of `model` that computes the last hidden states, or None."""
    # transformers' `base_model` is the whole model if its prefix names no attribute (Llama 4).
    names = (getattr(model, "base_model_prefix", ""), "model")
    return next((name for name in names if name in model._modules), None)


def body_of(model: Any) -> Any:
    """Return the part of `model` that computes the last hidden states, or `model` itself."""
    name = body_name(model)
    return model if name is None else getattr(model, name)


def cache_argument(model: Any) -> str:
    """Return the name of the argument with which `model` takes a cache.

    Raises:
        ValueError: it takes none.
    """
    takes = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in takes:
            return name
    raise ValueError("takes no cache")


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output.

    Raises:
        ValueError: there is none.
    """
    for name in _CACHE_NAMES:
        if (found := getattr(output, name, None)) is not None:
            return found
    raise ValueError("returned no cache")


def shell_of(model: Any) -> Any:
    """Return a separate module tree, in evaluation mode, that shares the model's weights."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    # With the memo, the deep copy keeps these tensors instead of copying them.
    shell = copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
    # The trainer's last long sequence may have left its angles in the module.
    reset_angles(shell)
    shell.config.use_cache = True
    return shell.eval()


def reset_angles(model: Any) -> None:
    """Give rotary modules their initial angles, in separate tensors.

    Dynamic NTK and LongRoPE write the angles of the last long sequence into the module, and dynamic
    NTK restores them only for a sequence that is shorter than its limit.
    """
    for module in model.modules():
        for name in [name for name in dir(module) if name.endswith("original_inv_freq")]:
            prefix = name.removesuffix("original_inv_freq")
            setattr(module, f"{prefix}inv_freq", getattr(module, name).clone())
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


@torch.no_grad()
def trial_copy(model: Any, max_context: int) -> Any:
    """Return a copy of `model` whose logits show what its layers do.

    Noise is added to its weights, its logits are large, and windows and chunks below `max_context`
    become `SHORT`. If the model exceeds 2 GB in float32, only small tensors and the head are copied
    and changed; the others are shared.
    """
    # Fresh weights hide much: gates that start at zero, norms of one, soft caps far above the
    # logits, uniform attention.
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    small = sum(tensor.numel() for tensor in tensors) * 4 <= _FULL_COPY_BYTES
    head = model.get_output_embeddings()
    own = {id(head.weight)} if head is not None else set()
    shared = {id(t): t for t in tensors if not small and t.numel() > _SMALL and id(t) not in own}
    trial = copy.deepcopy(model, memo=dict(shared)).eval()
    reset_angles(trial)
    trial.config.use_cache = True
    if small:
        trial = trial.float()
    drawn = _drawn()
    for index, tensor in enumerate(trial.parameters()):
        if tensor.is_floating_point() and id(tensor) not in shared:
            first, count = index * _STRIDE % _NUM_DRAWN, tensor.numel()
            times = -(-(first + count) // _NUM_DRAWN)
            # Noise of this size keeps a matrix's output as large as its input, so that activations
            # neither vanish nor explode over the layers.
            enough = drawn if times == 1 else drawn.repeat(times)
            noise = enough[first : first + count].view(tensor.shape)
            tensor.add_(
                noise.to(tensor), alpha=tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
            )
    shorten_windows(trial, max_context)
    head = trial.get_output_embeddings()
    if head is not None:
        ids = torch.arange(2, 10, device=model.device)[None] % head.weight.shape[0]
        largest = float(trial(input_ids=ids, use_cache=False).logits.abs().max())
        # Soft caps (Gemma 2: 30) affect only logits of similar size.
        if 0 < largest < _LARGE_LOGIT:
            head.weight.mul_(_LARGE_LOGIT / largest)
    return trial


def shorten_windows(model: Any, max_context: int) -> None:
    """Set windows and chunks below `max_context` to `SHORT`, in modules and in configs."""
    for module in model.modules():
        # Some modules copy the setting when they are created, others read the config in each pass.
        for holder in (module, getattr(module, "config", None)):
            for name in _WINDOWS:
                found = getattr(holder, name, None)
                if type(found) is int and SHORT < found < max_context:
                    setattr(holder, name, SHORT)
        rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta") and rope.get("rope_type") not in MOVING_ROPE:
            start = rope.get("original_max_position_embeddings", max_context)
            rope["original_max_position_embeddings"] = SHORT if start < max_context else start


@functools.cache
def _drawn() -> torch.Tensor:
    return torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0))


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_mixture(model: Any) -> bool:
    """Whether a model's configuration names several experts."""
    config = model.config.get_text_config(decoder=True)
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERT_COUNTS)
