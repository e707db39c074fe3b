"""Rotary angles that depend on the length of the sequence, and up to which length they do not.

`longrope` uses different frequencies for every token if a sequence is longer than the length that
the model was pretrained with, and `dynamic` NTK stretches all of them. A call of an interleaved
row or of a tree was sampled in a shorter context than the row's, with keys rotated for it, so
beyond that length no row reproduces the sampled logprobs. Up to it, every scope is exact.
"""

from __future__ import annotations

from typing import Any

from rolltree.training.layout import Forest
from rolltree.values.errors import TrainingError


def longest_exact(model: Any) -> tuple[int, str] | None:
    """Return the largest length at which a model's rotary angles are fixed, and their kind.

    None: they never depend on the length.
    """
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if kinds is None or config is None:
            continue
        # Some models have one kind of angles per type of layer.
        named = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer_type, kind in named:
            if kind == "longrope":
                settings = config.rope_parameters
                settings = settings if layer_type is None else settings[layer_type]
                limits.append((int(settings["original_max_position_embeddings"]), kind))
            elif "dynamic" in str(kind):
                limits.append((int(config.max_position_embeddings), kind))
    return min(limits, default=None)


def check_lengths(model: Any, forest: Forest, longest: tuple[int, str] | None) -> None:
    """Refuse a forest with a path that is longer than `longest`, the result of `longest_exact`.

    Raises:
        TrainingError: no forward pass reproduces the logprobs that were sampled on it.
    """
    if longest is None:
        return
    limit, kind = longest
    # Positions are depths, so this is the longest path.
    length = int(forest.positions.max()) + 1
    if length > limit:
        raise TrainingError(
            f"a path to train on has {length} tokens, and beyond {limit} tokens the rotary angles "
            f"of {type(model).__name__} ({kind}) change with the length of the whole sequence, so "
            "its logprobs would not be those it was sampled with, in any scope. Keep contexts "
            f"within {limit} tokens: set train.max_seq_len = {limit}, and the engine's longest "
            f"context (vLLM: --max-model-len {limit}) likewise."
        )
