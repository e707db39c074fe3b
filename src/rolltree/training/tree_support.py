"""For which models tree training is exact: what the configuration says, then a probe.

A model whose tokens interact through anything that has no form over a tree (a recurrence of another
kind, keys that are chosen by their score, an attention mask of its own) would silently train on the
wrong function. Such models are refused by name and can be trained row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from rolltree.errors import TrainingError
from rolltree.training.layout import collate
from rolltree.training.tree_attention import tree_attention, tree_layout
from rolltree.training.tree_recurrence import RECURRENT_TYPES, unknown_recurrence
from rolltree.types import Records, Sample

PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference between tree and rows, relative to the largest hidden value."""


Check: TypeAlias = Callable[[Any], str | None]
"""Takes a model's text configuration; returns why tree training is not exact for it, or None."""


def _exact(_config: Any) -> None:
    """Nothing rules it out."""


LAYER_TYPES: dict[str, Check] = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention"), _exact),
    **dict.fromkeys(("moe", "mlp"), _exact),
    **dict.fromkeys(RECURRENT_TYPES, _exact),  # their code is checked instead
}
"""What `config.layer_types` may name. A layer type that is not here is refused by its name."""


def _layer_types(config: Any) -> str | None:
    names = sorted({*(getattr(config, "layer_types", None) or [])})
    if other := [name for name in names if name not in LAYER_TYPES]:
        return f"it has layers of type {', '.join(other)}"
    return next((reason for name in names if (reason := LAYER_TYPES[name](config))), None)


def _shape(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal"
    return None


CONFIG_CHECKS: tuple[Check, ...] = (_shape, _layer_types)
"""Each returns why a configuration rules tree training out, or None."""


def why_not_tree(model: Any) -> str | None:
    """Return why `model` cannot be trained on trees, or None when it can.

    Reads the configuration, then compares a small tree with its rows on the model itself.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return "it is not a Hugging Face causal language model"
    config = config.get_text_config(decoder=True)
    for check in CONFIG_CHECKS:
        if reason := check(config):
            return reason
    if reason := unknown_recurrence(model, config):
        return reason
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    return _probe(model)


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


@torch.no_grad()
def _probe(model: Any) -> str | None:
    """Run prefix `a b`, branches `c d` and `e` as a tree and as rows, and compare."""
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (np.arange(5, dtype=np.int32) * 7919 + 11) % vocabulary
    position = np.array([0, 1, 2, 3, 2], np.int32)
    forest = collate(
        [Sample(ids, position, np.array([5, 5, 4, 4, 5], np.int32), _no_records(), ())]
    )
    base = model.base_model
    try:
        with tree_attention(model):
            tree = base(
                input_ids=torch.from_numpy(ids).long()[None].to(device),
                position_ids=torch.from_numpy(position).long()[None].to(device),
                use_cache=False,
                tree_layout=tree_layout(forest, device),
            ).last_hidden_state[0]
    except TrainingError as error:
        return str(error)
    for path in ([0, 1, 2, 3], [0, 1, 4]):
        row = torch.from_numpy(ids[path]).long()[None].to(device)
        rows = base(input_ids=row, use_cache=False).last_hidden_state[0]
        difference = float((rows - tree[path]).abs().max() / rows.abs().max())
        if not difference <= PROBE_TOLERANCE.get(rows.dtype, 1e-4):
            return f"on a small probe its tree and its rows differ by {difference:.2g}"
    return None


def _no_records() -> Records:
    ints = np.zeros(1, np.int32)
    floats = np.ones(1, np.float32)
    return Records(ints, ints, floats, floats, floats, floats, ints, ints, ints, ints)
