"""Which layers of a model carry a state from token to token: asked of every model.

Only a model that has some loads `tree_recurrence`, which computes them over a forest.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

KERNELS = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space",
    "mamba2_split_conv1d_scan_combined": "not_fused",
    "mamba_selective_scan": "selective_scan",
    "mamba_inner_fn": "not_fused",
}
"""The name that a layer's forward calls -> the function of `tree_recurrence` in its place."""

_ONE_TOKEN = frozenset(
    {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"}
    | {"mamba2_selective_state_update", "mamba_selective_state_update"}
)
"""Functions that these layers call only for one token with a cache, so never here."""

_MIXES = re.compile(r"conv1d|scan|delta|recurren|mamba|kda")
"""Names of functions that probably mix tokens."""

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""`config.layer_types` of layers that carry a state from token to token."""


def unknown_recurrence(model: Any, config: Any) -> str | None:
    """Return why the states of `model` cannot follow a tree, or None if they can."""
    layers = recurrent_layers(model)
    if unknown := sorted(
        set().union(*(mixing_functions(layer.__class__) - KERNELS.keys() for layer in layers))
    ):
        return f"its layers call {', '.join(unknown)}, which rolltree has no tree form of"
    types = [kind for kind in getattr(config, "layer_types", None) or () if kind in RECURRENT_TYPES]
    expected = len(types) or getattr(model, "_is_stateful", False)
    if len(layers) >= expected:
        return None
    what = f"layers of type {', '.join(sorted({*types}))}" if types else "layers"
    return (
        f"its {what} carry a state from token to token in a way that rolltree has no tree form of"
    )


def recurrent_layers(model: Any) -> list[Any]:
    """Return the modules of `model` that call one of `KERNELS`."""
    return [
        module for module in model.modules() if KERNELS.keys() & mixing_functions(module.__class__)
    ]


@functools.cache
def mixing_functions(kind: Any) -> frozenset[str]:
    """Return the names of functions with which the forward of a module class mixes tokens."""
    forward: Any = inspect.unwrap(kind.forward)
    if not inspect.isfunction(forward):
        return frozenset()
    # `co_names` also lists attributes, such as `self.conv1d`; only globals are kernels.
    names = frozenset(name for name in forward.__code__.co_names if _MIXES.search(name))
    return (names & forward.__globals__.keys()) - _ONE_TOKEN
