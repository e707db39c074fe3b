"""Attention of one flat batch of tokens over the slots they belong to.

`attend` computes it from an `AttentionPlan`: decoding rows together, other rows grouped by shape.
transformers calls it under the name `NAME`. The tokens that a layer's queries see (all, a sliding
window, a chunk) follow from the mask that the model requests from transformers; soft caps of scores
and attention sinks are arguments of the call. Anything else that a layer passes is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from rolltree.inference.local.plan import Alone, AttentionPlan, additive
from rolltree.values.errors import UnsupportedSetting

NAME = "rolltree_slots"
# Attention modules do not pass unknown arguments on, so the plan is passed in a context variable.
_plan: ContextVar[AttentionPlan] = ContextVar("rolltree_slots_plan")
# Arguments that do not change the result here: causality and window come from the mask.
_IGNORABLE = frozenset(
    {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"}
    | {"logits_to_keep", "cache_position", "cache", "past_key_values", "layer_idx"}
)


@contextmanager
def use_plan(plan: AttentionPlan) -> Iterator[None]:
    """Have transformers' attention modules use `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@dataclass(slots=True, eq=False)
class LayerMask:
    """A layer's mask: the earlier positions that a query sees."""

    # transformers' own function: architectures name the window differently in their configs, and
    # computing it here would risk off-by-one errors (design/0002).
    function: Callable[..., Tensor]
    # A query sees at most this many positions, its own included.
    reach: int
    _of: tuple[AttentionPlan, AttentionPlan] | None = field(default=None, init=False)

    def applied(self, plan: AttentionPlan) -> AttentionPlan:
        """Return `plan` with this mask instead of the causal mask."""
        # Layers with the same mask share this object, so the mask is made once per pass.
        if self._of is None or self._of[0] is not plan:
            self._of = plan, self._apply(plan)
        return self._of[1]

    def _apply(self, plan: AttentionPlan) -> AttentionPlan:
        # No sequence is longer than the window yet.
        if plan.extent[1] <= self.reach:
            return plan
        device = plan.positions.device
        decode = plan.decode
        if decode is not None:
            # Keys before the window of the query with the lowest position are not read.
            first = max(0, decode.oldest + 1 - self.reach)
            queries = torch.from_numpy(decode.start).to(device)
            hidden = self._hidden(queries, first, decode.length, decode.hidden.dtype)
            decode = replace(decode, first=first, hidden=hidden[:, None, None])
        prefills = []
        for prefill in plan.prefills:
            count = (prefill.tokens.stop - prefill.tokens.start) // len(prefill.rows)
            begin = prefill.length - count
            first = max(0, begin + 1 - self.reach)
            queries = torch.arange(begin, prefill.length, device=device)
            hidden = self._hidden(queries, first, prefill.length, plan.dtype)
            prefills.append(replace(prefill, first=first, hidden=hidden))
        alone = tuple(self._first(token, device) for token in plan.alone)
        return replace(plan, decode=decode, prefills=tuple(prefills), alone=alone)

    def _hidden(self, queries: Tensor, first: int, length: int, dtype: torch.dtype) -> Tensor:
        seen = self._seen(queries[:, None], first, length)
        return additive(~seen, dtype, seen.device)

    def _first(self, token: Alone, device: torch.device) -> Alone:
        first = max(0, token.length - self.reach)
        query = torch.tensor(token.length - 1, device=device)
        seen = self._seen(query, first, token.length).tolist()
        # The token reads one slice of keys, so hidden keys can only be at its start.
        if False in seen[seen.index(True) :]:
            raise UnsupportedSetting("its mask has holes")
        return token._replace(first=first + seen.index(True))

    def _seen(self, queries: Tensor, first: int, length: int) -> Tensor:
        keys = torch.arange(first, length, device=queries.device)
        return self.function(0, 0, queries, keys) & (keys <= queries)


def slot_mask(
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> LayerMask | None:
    """Return a layer's mask for transformers; None is the causal mask.

    Raises:
        UnsupportedSetting: the mask does not follow from positions alone.
    """
    if attention_mask is not None or use_vmap:
        raise UnsupportedSetting("its mask depends on more than positions")
    if mask_function is causal_mask_function:
        return None
    if local_size is None:
        raise UnsupportedSetting("its mask is neither causal nor a window")
    return LayerMask(mask_function, local_size)


@dataclass(frozen=True, slots=True)
class Extras:
    """Changes that some models make to scores `s` before the softmax."""

    # A soft cap c turns s into `c * tanh(s / c)` (Gemma 2).
    softcap: float | None
    # `[_H]`: an extra logit per head that takes weight but has no value (GPT-OSS).
    sinks: Tensor | None


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scaling: float,
    extras: Extras | None = None,
) -> Tensor:
    """Attend from `query` `[_T, _H, head_dim]` to slots `[slots, heads, capacity, head_dim]`.

    Returns `[_T, _H, value_dim]`. Each key head is shared by `_H / heads` query heads.
    """
    group = query.shape[1] // keys.shape[1]
    if plan.alone:
        return _attend_alone(query, keys, values, plan, scaling, extras)
    parts = []
    if plan.decode is not None:
        decode = plan.decode
        asked = query[: decode.num_tokens]
        if decode.rows is not None:
            # Idle rows between busy rows take part with a query of zeros: reading the cache in
            # place is cheaper than gathering the busy rows.
            spread = query.new_zeros((decode.num_rows, *query.shape[1:]))
            asked = spread.index_copy_(0, decode.rows, asked)
        attended = _softmax_attention(
            asked.view(decode.num_rows, -1, group, query.shape[2]),
            keys[: decode.num_rows, :, decode.first : decode.length],
            values[: decode.num_rows, :, decode.first : decode.length],
            decode.hidden,
            scaling,
            extras,
        ).view(*asked.shape[:2], -1)
        parts.append(attended if decode.rows is None else attended[decode.rows])
    for prefill in plan.prefills:
        num_rows = len(prefill.rows)
        asked = query[prefill.tokens].view(num_rows, -1, *query.shape[1:]).transpose(1, 2)
        seen = slice(prefill.first, prefill.length)
        attended = _softmax_attention(
            asked,
            _repeated(keys[:, :, seen], prefill.rows, group),
            _repeated(values[:, :, seen], prefill.rows, group),
            prefill.hidden,
            scaling,
            extras,
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_alone(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scaling: float,
    extras: Extras | None,
) -> Tensor:
    """Attend token by token, in shapes that depend only on each token's position.

    Padding tokens, after those in `plan.alone`, repeat the last token and get its result.
    """
    attended = query.new_empty((*query.shape[:2], values.shape[3]))
    for index, (row, length, first) in enumerate(plan.alone):
        attended[index] = _softmax_attention(
            # Query heads that share keys become queries of one head, so keys are not repeated.
            query[index].view(1, keys.shape[1], -1, query.shape[2]),
            keys[row, None, :, first:length],
            values[row, None, :, first:length],
            query.new_zeros(1) if extras else None,
            scaling,
            extras,
            causal=False,
        ).flatten(0, 2)
    attended[len(plan.alone) :] = attended[len(plan.alone) - 1]
    return attended


def _softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    scaling: float,
    extras: Extras | None,
    *,
    causal: bool = True,
) -> Tensor:
    """Attend from `[n, heads, queries, dim]` to `[n, heads, keys, dim]`.

    `hidden` is added to the scores; without it, query i sees the keys up to i if `causal`.
    """
    if extras is None:
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=hidden,
            is_causal=causal and hidden is None,
            scale=scaling,
        )
    scores = (query @ keys.transpose(2, 3)).float() * scaling
    if extras.softcap is not None:
        scores = (scores / extras.softcap).tanh_() * extras.softcap
    if hidden is None:
        # The query is a whole prompt from position 0, so its mask is triangular.
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    else:
        scores += hidden
    if extras.sinks is None:
        return scores.softmax(-1).to(values.dtype) @ values
    sinks = extras.sinks.float().view(1, query.shape[1], -1, 1).expand(*scores.shape[:3], 1)
    # The sink takes part in the normalisation but has no value.
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


def _repeated(states: Tensor, rows: list[int], group: int) -> Tensor:
    """Return the states of some rows, each head repeated for the queries that share it."""
    first, behind = rows[0], rows[-1] + 1
    # A slice is a view; a list of rows is a copy.
    chosen = states[first:behind] if behind - first == len(rows) else states[rows]
    return chosen if group == 1 else chosen.repeat_interleave(group, dim=1)


def slot_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: LayerMask | Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Call `attend` for transformers' attention modules: query `[1, _H, _T, head_dim]`.

    Raises:
        UnsupportedSetting: the layer needs something that `attend` does not support.
    """
    plan = _plan.get(None)
    unknown = [n for n, value in others.items() if n not in _IGNORABLE and value is not None]
    if plan is None or unknown or others.get("is_causal") is False:
        raise UnsupportedSetting(f"its attention is not plain: {unknown or 'it has no plan'}")
    if isinstance(attention_mask, Tensor):
        raise UnsupportedSetting("it makes its masks itself")
    if attention_mask is not None:
        plan = attention_mask.applied(plan)
    extras = None if softcap is None and s_aux is None else Extras(softcap, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = query[0].transpose(0, 1).contiguous()
    return attend(flat, keys, values, plan, scale, extras)[None], None


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, slot_mask)
