"""Merging token trees: the rollouts of a group share what they have in common.

Walks the other tree run by run, parents first, so the cost is O(unique tokens) at memcmp speed.
Knows both trees' columns. Leaves out which rollouts belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltree.tokens.arena import ROOT, Place
from rolltree.types import IntArray

if TYPE_CHECKING:
    from rolltree.tokens.tree import TokenTree


def map_tokens(tree: TokenTree, other: TokenTree) -> IntArray:
    """Add all tokens of `other` to `tree`; return the new arena index of each old one."""
    source, target = other.arena, tree.arena
    mapped = np.empty(source.num_tokens, dtype=np.int32)
    for run in range(source.num_runs):
        start, end = source.run_start[run], source.run_end(run)
        parent = source.run_parent[run]
        place = target.place(int(mapped[parent])) if parent >= 0 else ROOT
        last = target.extend(source.ids[start:end], place)
        position = start
        for low, high in target.slices(last, end - start):
            mapped[position : position + high - low] = np.arange(low, high, dtype=np.int32)
            position += high - low
    return mapped


def merge_into(tree: TokenTree, other: TokenTree) -> int:
    """Add the calls of `other` to `tree`; return the handle that `other`'s call 0 now has."""
    mapped = map_tokens(tree, other)
    first = len(tree.calls)

    def moved(token: int) -> Place:
        return tree.arena.place(int(mapped[token])) if token >= 0 else ROOT

    for call in range(len(other.calls)):
        parent = other.calls.parent[call]
        tree.record(
            moved(other.calls.prompt_token[call]),
            moved(other.calls.end_token[call]),
            other.prompt_len(call),
            other.num_sampled(call),
            parent=parent + first if parent >= 0 else -1,
            agent=other.agent(call),
            turn=other.turn(call),
            values=stream_values(other, call),
            extra=extra_values(other, call),
        )
    return first


def stream_values(tree: TokenTree, call: int) -> dict[str, Any]:
    """Return a call's per-token streams as they were given: number, array or None."""
    prompt, sampled = tree.prompt_len(call), tree.num_sampled(call)
    return {
        name: stream.raw(call, prompt if name == "prompt_mask" else sampled)
        for name, stream in tree.sampled.items()
    }


def extra_values(tree: TokenTree, call: int) -> Mapping[str, Any]:
    """Return a call's named extra streams."""
    found = ((name, tree.extra.get(name, call)) for name in tree.extra.names())
    return {name: stream for name, stream in found if stream is not None}
