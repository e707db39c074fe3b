"""Routed experts: the experts of a mixture model to which the engine sent each token of a call.

They are the stream `ROUTED_EXPERTS` of a token tree, integers `[layers, experts per token]` per
token. A call stores the experts of its new tokens. Its last sampled token was never an input of the
model, so the experts of that token come with the call that continues it.

Experts depend on the weights. An engine that gets new weights computes a context again, so the
experts of a whole call belong to the version that sampled its last token; a call whose version
differs from that of the call it extends stores all of its experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolltree.tokens.buffers import UnusableRouting
from rolltree.tokens.streams import TokenStream

if TYPE_CHECKING:
    from rolltree.tokens.tree import TokenTree

ROUTED_EXPERTS = "routed_experts"
"""The name of the stream in a token tree."""


def checked_routing(values: Any, path_len: int) -> NDArray[Any]:
    """Return the routed experts, `[n, layers, top_k]`, of a call of `path_len` tokens.

    Raises:
        UnusableRouting: they are not integers of that shape, or cover more tokens than the model's
            input.
    """
    array = np.asarray(values)
    if array.ndim != 3 or array.dtype.kind not in "iu" or not all(array.shape[1:]):
        raise UnusableRouting(
            f"the routed experts have shape {array.shape} and type {array.dtype}; they are "
            "integers [tokens, layers, experts per token]. Check the server."
        )
    if len(array) >= max(path_len, 1):
        raise UnusableRouting(
            f"there are routed experts of {len(array)} tokens, and the model was given "
            f"{max(path_len - 1, 0)} (the last sampled one is not), so they would be replayed at "
            "the wrong tokens. Check the server."
        )
    return array


def routing_streams(
    values: NDArray[Any] | None,
    path_len: int,
    tree: TokenTree,
    parent: int | None,
    versions: ArrayLike,
) -> dict[str, TokenStream]:
    """Return the stream of a new call of `tree`: `values` without those that `parent` recorded.

    `values`, `[n, layers, top_k]`, are the experts of the n tokens before the call's last one, and
    `versions` those of its sampled tokens, as in `TokenTree.insert`.

    Raises:
        UnusableRouting: as in `checked_routing`, or earlier calls have another shape.
    """
    if values is None:
        return {}
    array = checked_routing(values, path_len)
    kind, known_kind = (array.dtype.str, array.shape[1:]), tree.extra.kind(ROUTED_EXPERTS)
    if known_kind not in (None, kind):
        raise UnusableRouting(
            f"the routed experts are {kind}, and those of an earlier call of this rollout "
            f"{known_kind}: they are of several models. Check the servers."
        )
    # They end at the token before the last and may begin anywhere, since a server need not repeat
    # what it has reported.
    start = path_len - 1 - len(array)
    before = None
    # Different weights may choose different experts for the same tokens.
    if parent is not None and routing_version(tree, parent) == _last(versions):
        before = tree.stream(ROUTED_EXPERTS, parent)
    if isinstance(before, TokenStream):
        known = (before.start or 0) + len(before.values)
        array, start = array[max(0, known - start) :], max(start, known)
    return {ROUTED_EXPERTS: TokenStream(array, start)}


def routing_version(tree: TokenTree, call: int) -> int:
    """Return the policy version whose experts a call stores; -1 if it sampled nothing."""
    return _last(tree.versions(call))


def _last(versions: ArrayLike) -> int:
    # `versions` may be one number for all tokens, one for each, or empty.
    return int(next(iter(np.ravel(versions)[-1:]), -1))


def recorded_routing(tree: TokenTree, call: int) -> NDArray[Any] | None:
    """Return the routed experts of a call, as far back as it and the calls it extends have them.

    `[n, layers, top_k]`, for the n tokens before the call's last one; None without any.
    """
    parts: list[NDArray[Any]] = []
    first, at, version = tree.path_len(call) - 1, call, routing_version(tree, call)
    while True:
        stream = tree.stream(ROUTED_EXPERTS, at)
        parent = tree.parent(at)
        # The chain must not have gaps, since the result is for consecutive tokens.
        if not isinstance(stream, TokenStream) or (stream.start or 0) + len(stream.values) != first:
            break
        parts.append(stream.values)
        first = stream.start or 0
        if parent is None or not first or routing_version(tree, parent) != version:
            break
        at = parent
    return np.concatenate(parts[::-1]) if parts else None
