"""Can the embedded engine run this model? Found out by running it, not by its name.

The shape of the cache is read off a small forward pass, and the slot cache must then give the same
logits as no cache at all. The module knows nothing about requests. It leaves out models with
sliding windows shorter than the context, compressed or recurrent caches, and position embeddings
that depend on the rest of the batch: they are refused with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rolltree.errors import UnsupportedSetting
from rolltree.inference.local.cache import KvShape
from rolltree.inference.local.runner import ModelRunner, shell_of

_MOVING_ROPE = ("dynamic", "longrope")
_EXACT, _ROUNDED = 1e-3, 0.1  # largest relative difference of logits in fp32 and in fewer bits


@torch.inference_mode()
def probe(model: Any, max_context: int, packed: bool = False) -> tuple[KvShape, bool]:
    """Return the shape of one token's keys and values, and whether `LeanForward` fits `model`.

    `packed` is what `LeanForward` will be told.

    Raises:
        UnsupportedSetting: the engine would not reproduce this model; the message says why.
    """
    plain = shell_of(model)
    shape = _kv_shape(plain, max_context)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _MOVING_ROPE:
        raise _refusal(
            model,
            f"has {rope['rope_type']} position embeddings, which change with the longest sequence "
            "in the batch, so cached keys would not fit later tokens",
        )
    if _difference(model, plain, shape, lean=True, packed=packed) is None:
        return shape, True
    reason = _difference(model, plain, shape, lean=False)
    if reason is not None:
        raise _refusal(model, reason)
    return shape, False


def _kv_shape(model: Any, max_context: int) -> KvShape:
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    try:
        output = model(input_ids=ids, use_cache=True)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise _refusal(model, f"does not run on token ids alone ({error})") from error
    layers = getattr(getattr(output, "past_key_values", None), "layers", [])
    for index, layer in enumerate(layers):
        plain = type(layer) is DynamicLayer or (
            type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= max_context
        )
        if not (plain and layer.keys.shape == layer.values.shape == layers[0].keys.shape):
            raise _refusal(
                model,
                f"keeps a {type(layer).__name__} in layer {index}, not plain keys and values of "
                f"one shape for {max_context} tokens",
            )
    if not layers:
        raise _refusal(model, "returned no cache of keys and values")
    keys = layers[0].keys
    return KvShape(len(layers), keys.shape[1], keys.shape[3], keys.dtype, keys.device)


def _difference(
    model: Any, plain: Any, shape: KvShape, *, lean: bool, packed: bool = False
) -> str | None:
    """Compare two sequences of 3 and 6 tokens, computed together in three steps, with each alone.

    Returns what is wrong, or None.
    """
    ids = (np.arange(2, 14).reshape(2, 6) * 7 % model.config.vocab_size).astype(np.int32)
    lengths, one = np.array([3, 6]), np.ones(2, np.int64)
    try:
        runner = ModelRunner(model, shape, num_slots=2, capacity=6, lean=lean, packed=packed)
        runner.forward([0, 1], ids, 0 * one, lengths - 2)
        runner.forward([0, 1], ids, lengths - 2, one)
        found = runner.forward([0, 1], ids, lengths - 1, one)
    except (TypeError, ValueError, RuntimeError, LookupError, UnsupportedSetting) as error:
        return f"fails with a prepared cache: {error}"
    limit = _EXACT if shape.dtype in (torch.float32, torch.float64) else _ROUNDED
    for row, length in enumerate(lengths):
        alone = torch.from_numpy(ids[row : row + 1, :length]).long().to(shape.device)
        expected = plain(input_ids=alone, use_cache=False).logits[0, -1].float()
        gap = float((found[row] - expected).abs().max())
        if not gap <= limit * float(expected.abs().max()):
            return f"gives other logits in a batch with a cache than alone (by up to {gap:.1e})"
    return None


@torch.inference_mode()
def check_invariance(model: Any, shape: KvShape, lean: bool, packed: bool = False) -> None:
    """Compute a sequence alone, and another way with others; the logits must have the same bits.

    Raises:
        UnsupportedSetting: they differ.
    """
    ids = (np.arange(120).reshape(3, 40) * 7 % model.config.vocab_size).astype(np.int32)
    found = []
    for steps in (
        [([1], [0], [39]), ([1], [39], [1])],
        [
            ([0, 1], [0, 0], [38, 11]),
            ([1, 2], [11, 0], [28, 17]),
            ([0, 1, 2], [38, 39, 17], [1] * 3),
        ],
    ):
        runner = ModelRunner(
            model, shape, num_slots=3, capacity=40, lean=lean, packed=packed, invariant=True
        )
        for rows, start, counts in steps:
            logits = runner.forward(rows, ids, np.array(start), np.array(counts))
        found.append(logits[rows.index(1)])
    if not torch.equal(*found):
        gap = float((found[0] - found[1]).abs().max())
        raise UnsupportedSetting(
            f"batch_invariant cannot be had with {type(model).__name__} in {shape.dtype} on "
            f"{shape.device}: the same sequence got other logits in other company (by up to "
            f"{gap:.1e}). Try float32, or leave batch_invariant out."
        )


def _refusal(model: Any, reason: str) -> UnsupportedSetting:
    return UnsupportedSetting(
        f"the embedded engine cannot run {type(model).__name__}: it {reason}. What was sampled "
        "would not be what the model gives. Serve this model with vLLM and use its URL."
    )
