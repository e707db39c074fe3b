"""Checks that a model has the same outputs and gradients on a tree and on its rows.

It runs a copy of the first layers, with weights moved away from initialisation and short windows,
so that gates, sinks, sparse attention and states have an effect. The model itself, which an engine
may be serving, is not touched.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rolltree.inference.local.shell import body_of, trial_copy
from rolltree.samples.transform import blank_records
from rolltree.training.layout import Forest, collate
from rolltree.training.rope_lengths import longest_exact
from rolltree.training.tree_attention import tree_attention, tree_layout
from rolltree.values.errors import TrainingError
from rolltree.values.types import IntArray, Sample

Shape: TypeAlias = tuple[int, tuple["Shape", ...]]
"""A segment of a tree: how many tokens it has, and the segments that follow it."""
SHAPE: Shape = (37, ((29, ((33, ()), (5, ()))), (31, ()), (1, ())))
"""Longer than a block of keys, a chunk of a recurrence, and many short windows."""
TOLERANCE = 2e-4
"""Largest difference of last hidden states, relative to the largest one."""
GRADIENT_TOLERANCE = 1e-3
"""Largest difference of one parameter's gradient, relative to its norm and 1 % of the whole's."""


def why_tree_differs(model: Any) -> str | None:
    """Return why a tree would not be trained like its rows, or None if it would.

    A model that fails in any way on a tree is not trained on trees.
    """
    reason = None
    for shorten in (first_layers, _whole):
        try:
            # If the first layers do not run as a separate model, try the whole model.
            return _settled(_compare, trial_copy(shorten(model), max_context=sys.maxsize))
        except TrainingError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  (a model is a program; a part of it may fail)
            reason = f"it fails on a small tree with {error!r}"
    return reason


@torch.no_grad()
def why_rows_differ(model: Any) -> str | None:
    """Return why a row would not be trained like its calls, or None if it would.

    A row goes on after a call's last token, so a hidden state must not depend on later tokens. If
    no copy of a model runs, the model itself is tried; if that does not run, training fails.
    """
    for shorten in (first_layers, _whole, None):
        with suppress(Exception):  # a model is a program, and a part of it may fail
            return _settled(
                _looks_ahead,
                model if shorten is None else trial_copy(shorten(model), max_context=0),
            )
    return None


def _settled(compare: Callable[[Any, int], str | None], trial: Any) -> str | None:
    """Return the reason of `compare` if three sets of tokens fail, None if one of them passes.

    If two experts score alike, rounding decides between them; a real difference shows with any
    tokens.
    """
    reason = None
    for first in (11, 12, 13):
        if (reason := compare(trial, first)) is None:
            return None
    return reason


def _looks_ahead(trial: Any, first: int) -> str | None:
    embedding = trial.get_input_embeddings().weight
    limit, _ = longest_exact(trial) or (sys.maxsize, "")  # longer rows are refused one by one
    ids = probe_forest(embedding.shape[0], (min(66, limit), ()), first).ids
    row = torch.from_numpy(ids).long().to(embedding.device)[None]
    body = body_of(trial)
    whole = body(input_ids=row, use_cache=False).last_hidden_state[0]
    for count in (len(ids) - 1, len(ids) // 2, 8):
        part = body(input_ids=row[:, :count], use_cache=False).last_hidden_state[0]
        difference = _apart(whole[:count], part)
        # `not <=` instead of `>`, so that NaN is refused.
        if not difference <= TOLERANCE:
            return f"what its tokens get changes with what follows them, by {difference:.2g}"
    return None


def probe_forest(vocabulary: int, shape: Shape, first: int = 11) -> Forest:
    """Return a tree of that shape over arbitrary tokens from `first` on, with one record."""
    positions: list[int] = []
    ends: list[int] = []

    def lay(shape: Shape, depth: int) -> None:
        length, following = shape
        at = len(positions)
        positions.extend(range(depth, depth + length))
        ends.extend([0] * length)
        for child in following:
            lay(child, depth + length)
        ends[at : at + length] = [len(positions)] * length

    lay(shape, 0)
    count = len(positions)
    # A prime stride repeats no token before the whole vocabulary was used.
    ids = (np.arange(count, dtype=np.int64) * 7919 + first) % vocabulary
    row, depth, end = (np.array(column, np.int32) for column in (ids, positions, ends))
    one, source = np.ones(1, np.float32), np.full(1, count - 1, np.int32)
    record = blank_records(
        1, source=source, logprob=one, temperature=one, advantage=one, weight=one
    )
    return collate([Sample(row, depth, end, record, ())])


def paths_of(forest: Forest) -> list[IntArray]:
    """Return the positions of each path from the root to a leaf, int32."""
    places = np.arange(forest.num_tokens, dtype=np.int32)
    leaves = places[forest.subtree_end == places + 1]
    return [places[(places <= leaf) & (leaf < forest.subtree_end)] for leaf in leaves]


@torch.enable_grad()
def _compare(trial: Any, first: int) -> str | None:
    """Read a tree as a tree and row by row, and compare hidden states and gradients."""
    embedding = trial.get_input_embeddings().weight
    forest = probe_forest(embedding.shape[0], SHAPE, first)
    device, body = embedding.device, body_of(trial)
    ids = torch.from_numpy(forest.ids).long().to(device)
    trial.requires_grad_(False)
    learned = [p for p in body.parameters() if p is not embedding and p.is_floating_point()]
    for parameter in learned:
        parameter.requires_grad_(True)
    weights: Tensor | None = None

    def gradient(hidden: Tensor, at: Tensor) -> list[Tensor]:
        """Return the gradient of a fixed linear function of the hidden states of tokens `at`."""
        nonlocal weights
        if weights is None:
            drawn = torch.Generator().manual_seed(0)
            weights = torch.randn(len(ids), hidden.shape[-1], generator=drawn).to(device)
        # The function is linear, so the gradients of disjoint parts of the rows add up to the
        # tree's.
        total = (hidden.float() * weights[at]).sum()
        gradients = torch.autograd.grad(total, learned, allow_unused=True)
        pairs = zip(gradients, learned, strict=True)
        return [torch.zeros_like(p) if g is None else g for g, p in pairs]

    with tree_attention(trial):
        tree = body(
            input_ids=ids[None],
            position_ids=torch.from_numpy(forest.positions).long().to(device)[None],
            use_cache=False,
            tree_layout=tree_layout(forest, device),
        ).last_hidden_state[0]
        of_tree = gradient(tree, torch.arange(len(ids), device=device))
    of_rows = [torch.zeros_like(parameter) for parameter in learned]
    seen = np.zeros(len(ids), np.bool_)
    for path in paths_of(forest):
        places = torch.from_numpy(path).long().to(device)
        row = body(input_ids=ids[places][None], use_cache=False).last_hidden_state[0]
        difference = _apart(tree.detach()[places], row.detach())
        if not difference <= TOLERANCE:
            return f"on a small tree, its tree and its rows differ by {difference:.2g}"
        # Count a token that several paths share once, as the tree does.
        new = torch.from_numpy(~seen[path]).to(device)
        seen[path] = True
        for total, part in zip(of_rows, gradient(row[new], places[new]), strict=True):
            total += part
    difference = _widest(of_tree, of_rows)
    if not difference <= GRADIENT_TOLERANCE:
        return (
            f"on a small tree, the gradients of its tree and of its rows differ by {difference:.2g}"
        )
    return None


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _widest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest relative difference of a pair of gradients."""
    norms = [float(gradient.norm()) for gradient in theirs]
    # So that rounding does not count in a parameter that hardly matters.
    floor = 0.01 * sum(norm**2 for norm in norms) ** 0.5
    pairs = zip(ours, theirs, norms, strict=True)
    return max((float((a - b).norm()) / (norm + floor) for a, b, norm in pairs), default=0.0)


def _whole(model: Any) -> Any:
    return model


def first_layers(model: Any) -> Any:
    """Return a module tree around the same tensors, with the first layers only.

    At least two are kept, and enough to have a layer of every kind; all of them if it is not known
    which modules are the layers.
    """
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", 0)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1 or count <= 2:
        return model
    kinds = [_kind(layer, index, config) for index, layer in enumerate(lists[0])]
    kept = max(2, 1 + max(kinds.index(kind) for kind in kinds))
    # With the memo, the deep copy keeps these very tensors and takes the shortened list.
    memo: dict[int, Any] = {id(t): t for t in chain(model.parameters(), model.buffers())}
    memo[id(lists[0])] = nn.ModuleList(copy.deepcopy(layer, memo) for layer in lists[0][:kept])
    short = copy.deepcopy(model, memo)
    short.config.get_text_config(decoder=True).num_hidden_layers = kept
    return short


def _kind(layer: nn.Module, index: int, config: Any) -> tuple[Any, ...]:
    """Return what distinguishes layers: modules, settings, and entries of the config."""
    count = config.num_hidden_layers
    listed = [v[index] for v in vars(config).values() if isinstance(v, list) and len(v) == count]
    parts: list[Any] = [repr(listed)]
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            # `layer_idx` differs in every layer and says nothing about its kind.
            if isinstance(value, bool | int | float | str) and "idx" not in key
        }
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        parts.append((name, type(module).__name__, sorted(plain.items()), shapes))
    return tuple(map(repr, parts))
