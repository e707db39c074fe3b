"""One model and its slot cache: new tokens of some rows in, logits after each row's last token out.

The runner works on a shell of its own around the trainer's parameters, so the trainer's mode
(dropout, gradient checkpointing, attention kernel) and the engine's do not disturb each other,
while an optimizer step is seen at once. `probe` finds out whether a model can be run this way by
running it, not by its name.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rolltree.errors import UnsupportedSetting
from rolltree.inference.local.attention import NAME, AttentionPlan, invariant_plans, make_plan
from rolltree.inference.local.lean import LeanForward
from rolltree.inference.local.slots import KvShape, SlotCache
from rolltree.types import IntArray

_MOVING_ROPE = ("dynamic", "longrope")
_EXACT, _ROUNDED = 1e-3, 0.1  # largest relative difference of logits in fp32 and in fewer bits


class ModelRunner:
    """Forward passes of `model` over rows of `num_slots` sequences of up to `capacity` tokens.

    With `lean` they go through `LeanForward` (which raises `TypeError` for a model it does not
    know), else through transformers; `packed` is its. With `invariant` a row's logits do not depend
    on the others.
    """

    def __init__(
        self,
        model: Any,
        shape: KvShape,
        num_slots: int,
        capacity: int,
        *,
        lean: bool,
        packed: bool = False,
        invariant: bool = False,
    ) -> None:
        self._source, self.lean, self._invariant = model, lean, invariant
        self._packed = packed
        self.cache = SlotCache(shape, num_slots, capacity)
        self._read_model()

    def refresh(self) -> None:
        """Take over parameters that were replaced by other tensors (rather than changed)."""
        now = [id(parameter) for parameter in self._source.parameters()]
        if now != self._parameters:
            self._read_model()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters that `forward` reads, or copies of which `pack` renews."""
        if isinstance(self._model, LeanForward):
            return self._model.tensors()
        return list(self._model.parameters())

    def pack(self) -> None:
        """Take over parameters that were changed in place."""
        if isinstance(self._model, LeanForward):
            self._model.pack()

    def forward(
        self,
        rows: list[int],
        ids: IntArray,
        start: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> torch.Tensor:
        """Compute `counts[i]` more tokens of each row and return the logits after them.

        Args:
            rows: the slots, ascending, `_B` of them.
            ids: int32 `[slots, capacity]`, the ids of every slot.
            start: `[_B]`, the first position to compute; all earlier ones are cached.
            counts: `[_B]`, at least 1.

        Returns:
            float32 `[_B, _V]`, after the last computed token of each row; the caller's to change.
        """
        data = self.cache.data
        if self._invariant:
            logits = data.new_empty((len(rows), self._source.config.vocab_size))
            for plan, ending in invariant_plans(rows, counts, start, ids, data.device):
                logits[ending] = self._logits(plan)[: len(ending)]
            return logits.float()
        plan = make_plan(rows, counts, start, ids, data.dtype, data.device)
        logits = self._logits(plan).float()
        return logits if plan.in_order is None else logits[plan.in_order]

    def _logits(self, plan: AttentionPlan) -> torch.Tensor:
        if isinstance(self._model, LeanForward):
            return self._model(plan, self.cache)
        self.cache.plan = plan
        output = self._model(
            input_ids=plan.tokens[None],
            position_ids=plan.positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=plan.newest,
            plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _read_model(self) -> None:
        self._parameters = [id(parameter) for parameter in self._source.parameters()]
        self._model: Any = (
            LeanForward(self._source, packed=self._packed)
            if self.lean
            else _slot_shell(self._source)
        )


def shell_of(model: Any) -> Any:
    """Return a module tree of its own, in evaluation mode, around the very same tensors."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    shell = copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
    shell.config.use_cache = True
    return shell.eval()


def _slot_shell(model: Any) -> Any:
    shell = shell_of(model)
    shell.config._attn_implementation = NAME
    return shell


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
            f"batch_invariant is not supported by {type(model).__name__} in {shape.dtype} on "
            f"{shape.device}: a sequence's logits change with the batch (by up to {gap:.1e}). "
            "Try float32, or leave batch_invariant out."
        )


def _refusal(model: Any, reason: str) -> UnsupportedSetting:
    return UnsupportedSetting(
        f"the embedded engine cannot run {type(model).__name__}: it {reason}. What was sampled "
        "would not be what the model gives. Serve this model with vLLM and use its URL."
    )
