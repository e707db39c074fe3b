"""Where the body of a causal language model is: what computes its last hidden states."""

from __future__ import annotations

from typing import Any


def body_name(model: Any) -> str | None:
    """Return the attribute of `model` that is its body, or None.

    transformers' `base_model` is the whole model where its prefix names no attribute (Llama 4).
    """
    names = (getattr(model, "base_model_prefix", ""), "model")
    return next((name for name in names if name in model._modules), None)


def body_of(model: Any) -> Any:
    """Return what computes the last hidden states; `model` itself where that is not part of it."""
    name = body_name(model)
    return model if name is None else getattr(model, name)
