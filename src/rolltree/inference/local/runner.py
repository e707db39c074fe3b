"""Runs one model with a slot cache: new tokens of some rows in, logits after each row's last out.

The runner has its own shell around the trainer's parameters, so the modes of trainer and engine
(dropout, gradient checkpointing, attention kernel) do not interfere, while an optimizer step takes
effect at once. `probe.py` finds out whether a model can be run this way.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.inference.local.attention import NAME, use_plan
from rolltree.inference.local.lean import LeanForward
from rolltree.inference.local.plan import AttentionPlan, invariant_plans, make_plan
from rolltree.inference.local.shell import cache_argument, shell_of
from rolltree.inference.local.slots import KvShape, SlotCache
from rolltree.values.types import IntArray


class ModelRunner:
    """Forward passes of `model` over rows of `num_slots` sequences of up to `capacity` tokens.

    With `lean` they run `LeanForward` (which raises `TypeError` for a model it does not know) with
    the argument `packed`, else transformers' forward. With `invariant` a row's logits do not depend
    on the other rows.
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
        """Use the model's current parameters if tensors were replaced (not changed in place)."""
        # Compared by identity: a shell shares the trainer's tensors, so changes in place need
        # nothing.
        now = [id(parameter) for parameter in self._source.parameters()]
        if now != self._parameters:
            self._read_model()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters that `forward` reads, or copies that `pack` renews."""
        if isinstance(self._model, LeanForward):
            return self._model.tensors()
        return list(self._model.parameters())

    def pack(self) -> None:
        """Renew packed copies after parameters were changed in place."""
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
            float32 `[_B, _V]`, after the last computed token of each row; callers may change it.
        """
        device, dtype = self.cache.device, self.cache.dtype
        if self._invariant:
            size = len(rows), self._source.config.get_text_config().vocab_size
            # Passes of a fixed shape add up a row's sums in the same order, whatever the other
            # rows are (design/0002).
            logits = torch.empty(size, dtype=dtype, device=device)
            for plan, ending in invariant_plans(rows, counts, start, ids, device):
                logits[ending] = self._logits(plan)[: len(ending)]
            return logits.float()
        plan = make_plan(rows, counts, start, ids, dtype, device)
        logits = self._logits(plan).float()
        # The flat batch has rows with one token first; the caller's order is restored.
        return logits if plan.in_order is None else logits[plan.in_order]

    def _logits(self, plan: AttentionPlan) -> torch.Tensor:
        if isinstance(self._model, LeanForward):
            return self._model(plan, self.cache)
        self.cache.plan = plan
        with use_plan(plan):
            output = self._model(
                input_ids=plan.tokens[None],
                position_ids=plan.positions[None],
                use_cache=True,
                **{self._cache_name: self.cache},
                # Only the last token of each row needs the head, which is a large matrix.
                **({"logits_to_keep": plan.newest} if self._keeps else {}),
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps else logits[plan.newest]

    def _read_model(self) -> None:
        self._parameters = [id(parameter) for parameter in self._source.parameters()]
        self._model: Any = (
            LeanForward(self._source, packed=self._packed)
            if self.lean
            else _slot_shell(self._source)
        )
        self._cache_name = "" if self.lean else cache_argument(self._source)
        self._keeps = "logits_to_keep" in inspect.signature(self._source.forward).parameters


def _slot_shell(model: Any) -> Any:
    shell = shell_of(model)
    shell.config._attn_implementation = NAME
    return shell
