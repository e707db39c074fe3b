"""Exact attention over a packed forest, inside any Hugging Face causal LM.

It registers one attention function with transformers and touches no model code: inside
`tree_attention(model)` the function runs over the blocks of `tree_blocks.py` (or FlexAttention,
`training/models/tree_flex.py`), everywhere else it is the attention that the model had before, also
for an engine that decodes with the same module in another thread. How far back a layer looks is
read from the mask that the model asks transformers for. `tree_support.py` says which models it is
exact for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rolltree.training.layout import FULL, Pattern
from rolltree.training.models.recurrent_layers import recurrent_layers
from rolltree.training.tree_blocks import TreeLayout, forest_attention
from rolltree.training.tree_blocks import tree_layout as tree_layout
from rolltree.values.errors import TrainingError

NAME = "rolltree_tree"
_OWN: dict[str, str] = {}
"""Name of a registered attention -> the attention that the model has outside trees."""

# The functions that build masks do not receive the layout, and an engine may build its own masks in
# another thread with the same configuration. A context variable tells them apart (design/0003).
_active: ContextVar[bool] = ContextVar("rolltree_tree_active", default=False)
# Keywords that models pass on to their attention function and that do not change its result.
_IGNORABLE = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
    | {"return_dict", "logits_to_keep", "num_items_in_batch", "cache_position"}
)
_OTHERWISE = "Train it with train.forward = 'rows' and scope 'interleave'."

Closure = Mapping[str, Any]
_PARTS: dict[str, Callable[[Closure], Pattern]] = {
    "causal_mask_function": lambda closure: FULL,
    "sliding_window_overlay": lambda closure: Pattern(window=closure["sliding_window"]),
    "chunked_overlay": lambda closure: Pattern(chunk=_chunk(closure)),
    # The layout of a forest already keeps its paths apart.
    "packed_sequence_mask_function": lambda closure: FULL,
    "remap_positions_for_packed_sequence": lambda closure: _pattern(closure["mask_function"]),
    "and_masks": lambda closure: _all_of(closure["mask_functions"]),
}
"""The functions of transformers' masks -> how far back they let a token of a path see."""


def _chunk(closure: Closure) -> int:
    if bool(closure["left_padding"].any()):
        raise _unknown_mask("with padding on the left")
    return int(closure["chunk_size"])


def _all_of(parts: tuple[Any, ...]) -> Pattern:
    pattern = FULL
    for part in parts:
        pattern &= _pattern(part)
    return pattern


def _pattern(mask_function: Any) -> Pattern:
    """Return how far back a mask of `transformers.masking_utils` lets a token see.

    Raises:
        TrainingError: it has a part that is not in `_PARTS`.
    """
    # Masks are closures, such as `sliding_window_overlay.<locals>.inner_mask`: the outer function's
    # name says what they hide, and the closure holds the numbers.
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    # A model may define its own function with the same name, which could mean anything.
    home = getattr(mask_function, "__module__", None)
    if name not in _PARTS or home != masking_utils.__name__:
        raise _unknown_mask(f"that is made by {name}")
    return _PARTS[name](inspect.getclosurevars(mask_function).nonlocals)


def _is_causal(mask_function: Any) -> bool:
    """Whether a part of the mask hides from every token what comes after it."""
    if mask_function is masking_utils.causal_mask_function:
        return True
    closure = inspect.getclosurevars(mask_function).nonlocals
    inner = [*closure.get("mask_functions", ()), closure.get("mask_function")]
    return any(_is_causal(part) for part in inner if part is not None)


def _unknown_mask(what: str) -> TrainingError:
    return TrainingError(
        f"the model asks for an attention mask {what}, which attention over trees does not "
        f"compute, so its gradients would be wrong. {_OTHERWISE}"
    )


def _mask(*args: Any, own: str, **kwargs: Any) -> Any:
    """Return the pattern that a mask stands for (None if it is plain causal) instead of the mask.

    Calls from outside `tree_attention` get the mask that the model had before.
    """
    if not _active.get():
        return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)
    padding = kwargs.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise _unknown_mask("with padding")
    asked = kwargs.get("mask_function", masking_utils.causal_mask_function)
    pattern = _pattern(asked)
    if not _is_causal(asked):
        raise _unknown_mask("that is not causal")
    # For a plain causal mask, transformers gives SDPA layers None too, so models handle it.
    return None if pattern == FULL else pattern


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    own: str,
    tree_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if tree_layout is None:
        if _active.get():
            raise TrainingError(
                f"{type(module).__name__} did not pass the tree layout on to its attention, so its "
                "tokens would see other samples. This model cannot be trained on trees: train it "
                "with train.forward = 'rows' and scope 'interleave'."
            )
        result: tuple[Tensor, Tensor | None] = _own_attention(module, own)(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    out = _tree_attention(module, query, key, value, attention_mask, tree_layout, **kwargs)
    # Models reshape the result in place, which needs contiguous memory.
    return out.contiguous(), None


def _tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Any,
    layout: TreeLayout,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    # An unknown keyword that is set might change the result, so refuse it.
    foreign = {k for k, v in kwargs.items() if v is not None and v is not False} - _IGNORABLE
    what = ""
    if foreign:
        what = f"uses {', '.join(sorted(foreign))}"
    elif dropout:
        what = "has attention dropout"
    elif pattern is not None and not isinstance(pattern, Pattern):
        what = "makes its own attention mask"
    elif pattern is None and not _causal(module, is_causal):
        what = "lets tokens see what comes after them"
    elif sliding_window is not None and sliding_window != (pattern or FULL).window:
        # The mask decides (design/0003), but some layers also repeat their window here.
        what = f"has a sliding_window of {sliding_window} tokens that its mask does not have"
    elif key.shape[2] != layout.num_tokens or query.shape[0] != 1:
        what = f"attends to {key.shape[2]} keys, but the forest has {layout.num_tokens} tokens"
    if what:
        raise TrainingError(
            f"{type(module).__name__} {what}, which attention over trees does not compute, so its "
            f"gradients would be wrong. {_OTHERWISE}"
        )
    return forest_attention(
        _by_depth(module, query, layout),
        key,
        value,
        layout,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        pattern=pattern or FULL,
        softcap=softcap,
        sinks=s_aux,
    )


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal


def _by_depth(module: torch.nn.Module, query: Tensor, layout: TreeLayout) -> Tensor:
    """Scale the queries of Llama 4 by their depth instead of their place in the row.

    Its layers without rotary angles multiply the query of token i with
    `log1p(floor((i + 1) / floor_scale)) * attn_scale + 1` (arXiv:2501.19399).
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    attention: Any = module

    def scale(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        scaled: Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
        return scaled

    depth = torch.from_numpy(layout.depth).to(query.device)
    # The model has already scaled by the position in the row, so divide by that factor.
    factor = scale(depth) / scale(torch.arange(layout.num_tokens, device=query.device))
    return query * factor[:, None].to(query.dtype)


def _own_attention(module: torch.nn.Module, own: str) -> Callable[..., Any]:
    """Return the model's attention outside trees; `eager` is in the model's own file."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
    return attention


def register_tree_attention(own: str) -> str:
    """Return the name under which a model that attends with `own` attends over trees."""
    if own in _OWN:
        # A nested context: the model already attends over trees.
        return own
    name = next((name for name, known in _OWN.items() if known == own), f"{NAME}_{len(_OWN)}")
    if name not in _OWN:
        _OWN[name] = own
        AttentionInterface.register(name, partial(_attention, own=own))
        AttentionMaskInterface.register(name, partial(_mask, own=own))
    return name


def _recurrence(model: Any) -> AbstractContextManager[None]:
    """Return the context in which recurrent layers, if there are any, follow the forest."""
    if not recurrent_layers(model):
        return nullcontext()
    from rolltree.training.models.tree_recurrence import tree_recurrence

    return tree_recurrence(model, _active.get)


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Make `model` accept the keyword `tree_layout` while the context is open.

    Backward passes with gradient checkpointing must run inside it too. Afterwards the model has the
    attention that it had before.
    """
    # An engine may read this configuration at the same time. Without a layout, the registered
    # function is the attention that the model had before.
    before = model.config._attn_implementation
    model.config._attn_implementation = register_tree_attention(before or "eager")
    token = _active.set(True)
    try:
        with _recurrence(model):
            yield
    finally:
        _active.reset(token)
        model.config._attn_implementation = before
