"""Decides whether tree training is exact for a model: by its configuration, then by a probe.

A model whose tokens interact through anything that has no form over a tree (an unknown
recurrence, keys that are chosen by their score, its own attention mask) would silently train on the
wrong function. Such models are refused by name and can be trained row by row.
"""

from __future__ import annotations

from typing import Any

from rolltree.training.models.recurrent_layers import RECURRENT_TYPES, unknown_recurrence
from rolltree.training.tree_probe import why_rows_differ, why_tree_differs
from rolltree.values.errors import TrainingError

LAYER_TYPES = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention"),
        # These compute each token by itself.
        *("moe", "mlp"),
        # For these the code of the layers is checked (`unknown_recurrence`).
        *RECURRENT_TYPES,
    }
)
"""Supported entries of `config.layer_types`. Others are refused by name."""


def why_not_tree(model: Any) -> str | None:
    """Return why `model` cannot be trained on trees, or None if it can.

    Reads the configuration and the code of its layers, then compares a small tree with its rows on
    a copy of the first layers.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return "it is not a Hugging Face causal language model"
    config = config.get_text_config(decoder=True)
    # Named reasons first: the probe can only say that something differs.
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    if others := sorted({*(getattr(config, "layer_types", None) or [])} - LAYER_TYPES):
        return f"it has layers of type {', '.join(others)}"
    if reason := unknown_recurrence(model, config):
        return reason
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    return why_tree_differs(model)


def check_row_support(model: Any) -> None:
    """Refuse a model that is not exact even on rows.

    Raises:
        TrainingError: with the reason.
    """
    if reason := why_rows_differ(model):
        raise TrainingError(
            f"{type(model).__name__} cannot be trained: {reason}. The logprobs of the trainer "
            "would not be those that tokens were sampled with. Use a causal language model."
        )


def check_tree_support(model: Any) -> None:
    """Refuse a model for which tree training is not exact.

    Raises:
        TrainingError: with the reason.
    """
    if reason := why_not_tree(model):
        raise TrainingError(
            f"{type(model).__name__} cannot be trained on token trees: {reason}. The gradient "
            "would not be that of its rows. Set train.forward = 'rows' and train.scope = "
            "'interleave'."
        )
