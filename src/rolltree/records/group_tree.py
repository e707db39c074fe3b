"""Rollouts aligned as one tree by token id: the group lens, and the tree picture of a rollout.

The calls of all rollouts are put into one `TokenTree`, so what several saw or said alike is there
once. A segment is a piece of it that the same calls go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.errors import UnknownName
from rolltree.records.token_lens import one_rollout
from rolltree.records.token_rows import (
    places,
    sampled_facts,
    state_of,
    trained_tokens,
)
from rolltree.records.tokenizer import RunTokenizer, shown_tokenizer
from rolltree.samples.resolve import ResolvedRollout, ResolvedStep, resolve_rollout
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.tokens import TokenTree
from rolltree.types import IntArray

# Of a longer segment only the text of its beginning and of its end is given.
MAX_SHOWN_TOKENS = 2_000


@dataclass(frozen=True, slots=True)
class _Member:
    """One rollout of the tree."""

    row: StoredRollout
    rollout: ResolvedRollout | None
    trained: TrainedRollout | None
    # Its calls in the common tree, in the order of `rollout.calls`.
    handles: tuple[int, ...]

    @property
    def name(self) -> dict[str, Any]:
        return {
            "request_id": self.row.request_id,
            "trajectory_index": self.row.trajectory_index,
            "agent": self.row.agent,
        }


@dataclass(frozen=True, slots=True)
class _Segments:
    """Pieces of a tree: from `start` to `end` in the arena."""

    start: IntArray
    end: IntArray
    # The segment above; -1 for the root.
    parent: IntArray
    # How many tokens stand above a piece.
    start_depth: IntArray
    # The segment of each token of the arena.
    of: IntArray


def group_tree(run: Run, group_id: str, *, agent: str | None = None) -> dict[str, Any]:
    """Return the rollouts of a group as one tree with reward and advantage on each branch.

    With `agent` only those of this agent, which were asked alike; `agents` are all of the group.

    Raises:
        UnknownName: the run has no such group, or the group no such agent.
    """
    every = sorted(
        run.rollouts(group_id=group_id), key=lambda row: (row.index_in_group, row.trajectory_index)
    )
    if not every:
        raise UnknownName(f"{run.path} has no group {group_id!r}.")
    agents = list(dict.fromkeys(row.agent for row in every))
    rows = [row for row in every if agent is None or row.agent == agent]
    if not rows:
        raise UnknownName(f"the group {group_id!r} has no agent {agent!r}.")
    tree, members = _common_tree(run, rows)
    segments, shown = _segments(tree), shown_tokenizer(run)
    paths = [_path(tree, segments, member) for member in members]
    inside: list[list[int]] = [[] for _ in segments.start]
    for index, path in enumerate(paths):
        for segment in path:
            inside[segment].append(index)
    rewards = [member.row.reward for member in members]
    by_model, paid = _sampled(tree, members, segments)
    own = [member.row.parent_rollout is None for member in members]
    # Delegated rollouts are compared with others of their subtask, not with the group.
    middle = _mean([reward for reward, is_own in zip(rewards, own, strict=True) if is_own])
    first = rows[0]
    return {
        "group_id": group_id,
        "phase": first.phase,
        "train_step": first.train_step,
        "example": {
            "env_id": first.env_id,
            "task": first.task,
            "example_id": None if first.example_id is None else str(first.example_id),
        },
        "agents": agents,
        "has_tokenizer": shown is not None,
        "is_trained": any(member.trained is not None for member in members),
        "reward": middle,
        # Parents first. `authors` are `[author, tokens]` in order, `pieces` the `author` and `text`
        # of each: None without a tokenizer (`ids` then), of long ones the middle is left out.
        "segments": [
            {
                "parent": int(segments.parent[at]),
                # Tokens above it.
                "start": int(segments.start_depth[at]),
                "num_tokens": int(segments.end[at] - segments.start[at]),
                **_said(tree, by_model, segments, at, shown),
                # Which members go through it, and the mean over the scored ones.
                "members": inside[at],
                "reward": _mean([rewards[index] for index in inside[at]]),
                # The mean over its sampled tokens as they were trained; None if there is none.
                "advantage": paid[at],
            }
            for at in range(len(segments.start))
        ],
        "members": [
            {
                **member.name,
                "index_in_group": member.row.index_in_group,
                "reward": member.row.reward,
                # Its reward minus the mean of the group's own rollouts; None for a delegated one,
                # which is compared with others.
                "above_mean": _above(member.row.reward, middle) if is_own else None,
                # The mean over its sampled tokens; None if training did not record them.
                "advantage": _member_advantage(member.trained),
                "status": member.row.status,
                "error_type": member.row.error_type,
                "truncated": member.row.truncated,
                "stop_condition": member.row.stop_condition,
                "num_completion_tokens": member.row.num_completion_tokens,
                # Its segments in the order in which its calls reach them.
                "path": path,
                "calls": _calls(tree, segments, member),
            }
            for member, path, is_own in zip(members, paths, own, strict=True)
        ],
        # How many tokens all members begin with, and the segment behind which they part: None if
        # they do not.
        "shared_tokens": _shared(segments, inside, len(members)),
        "first_parting": _parting(segments, inside),
        "num_tokens": tree.num_tokens,
        # Tokens of all calls over tokens of the tree.
        "reuse_factor": _reuse_factor(tree),
    }


def tree_picture(
    run: Run,
    request_id: str | None = None,
    trajectory_index: int = 0,
    *,
    group_id: str | None = None,
) -> dict[str, Any]:
    """Return the token tree of a rollout, or of a group, to draw to scale.

    Raises:
        UnknownName: the run has no such rollout or group.
    """
    if group_id is not None:
        rows = list(run.rollouts(group_id=group_id))
    else:
        rows = [one_rollout(run, str(request_id), trajectory_index)]
    if not rows:
        raise UnknownName(f"{run.path} has no group {group_id!r}.")
    tree, members = _common_tree(run, rows, trained=False)
    segments = _segments(tree)
    by_model, _ = _sampled(tree, members, segments)
    count, first = _passing(tree, segments, members)
    sampled = np.add.reduceat(by_model.astype(np.int64), segments.start) if len(count) else count
    return {
        "members": [member.name for member in members],
        "segments": [
            {
                "parent": int(segments.parent[index]),
                "start_depth": int(segments.start_depth[index]),
                "length": int(segments.end[index] - segments.start[index]),
                # How many of its tokens the model wrote, and how many calls go through it.
                "sampled": int(sampled[index]),
                "calls": int(count[index]),
                # Member, call and the position of its first token there, for the token lens.
                "at": [*first[index], int(segments.start_depth[index])],
            }
            for index in range(len(segments.start))
        ],
        "num_tokens": tree.num_tokens,
        "num_calls": tree.num_calls,
        "reuse_factor": _reuse_factor(tree),
    }


def _common_tree(
    run: Run, rows: Sequence[StoredRollout], *, trained: bool = True
) -> tuple[TokenTree, list[_Member]]:
    """Return one tree with the calls of all rows, and whose calls they are."""
    # Merging puts equal prefixes of different rollouts in one place: that is the alignment.
    tree = TokenTree()
    members: list[_Member] = []
    for row in rows:
        state = state_of(row)
        rollout = None if state is None else resolve_rollout(0, state)
        if rollout is None:
            members.append(_Member(row, None, None, ()))
            continue
        first = tree.merge(rollout.tree)
        handles = tuple(first + step.handle for step in rollout.calls)
        members.append(
            _Member(row, rollout, trained_tokens(run, row) if trained else None, handles)
        )
    return tree, members


def _segments(tree: TokenTree) -> _Segments:
    """Cut a tree where runs begin, where branches leave, and where calls end."""
    arena = tree.arena
    parents = np.array(arena.run_parent, np.int32)
    starts = np.array(arena.run_start, np.int32)
    ends = np.array(tree.calls.end_token, np.int32)
    # One cell more than tokens: a cut behind the last token is past the end, and dropped below.
    cut = np.zeros(arena.num_tokens + 1, bool)
    cut[starts] = True
    cut[parents[parents >= 0] + 1] = True
    cut[ends[ends >= 0] + 1] = True
    cut = cut[: arena.num_tokens]
    start = np.flatnonzero(cut).astype(np.int32)
    end = np.append(start[1:], arena.num_tokens).astype(np.int32) if len(start) else start
    of = (np.cumsum(cut) - 1).astype(np.int32)
    run_of = np.searchsorted(starts, start, side="right") - 1
    is_head = starts[run_of] == start
    above = np.where(is_head, parents[run_of], start - 1)
    parent = np.where(above >= 0, of[above], -1).astype(np.int32)
    depth = np.array(arena.run_depth, np.int32)[run_of] + start - starts[run_of]
    return _Segments(start, end, parent, depth.astype(np.int32), of)


def _ends(
    tree: TokenTree, segments: _Segments, member: _Member
) -> list[tuple[ResolvedStep, int, int]]:
    """Return each call of a member with its handle and the segment it ends in (-1: no tokens)."""
    steps = () if member.rollout is None else member.rollout.calls
    tokens = [tree.calls.end_token[handle] for handle in member.handles]
    ends = [int(segments.of[token]) if token >= 0 else -1 for token in tokens]
    return list(zip(steps, member.handles, ends, strict=True))


def _path(tree: TokenTree, segments: _Segments, member: _Member) -> list[int]:
    """Return the segments of all calls of a rollout, each once, in the order they are reached."""
    path: dict[int, None] = {}
    for _, _, at in _ends(tree, segments, member):
        new: list[int] = []
        while at >= 0 and at not in path:
            new.append(at)
            at = int(segments.parent[at])
        path |= dict.fromkeys(reversed(new))
    return list(path)


def _passing(
    tree: TokenTree, segments: _Segments, members: Sequence[_Member]
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Return how many calls go through each segment, and the first: its member and its call."""
    never = (len(members), 0)
    count = np.zeros(len(segments.start), np.int64)
    first = [never] * len(count)
    for index, member in enumerate(members):
        for step, _, at in _ends(tree, segments, member):
            if at >= 0:
                count[at] += 1
                first[at] = min(first[at], (index, step.index))
    for at in range(len(count) - 1, 0, -1):  # a parent stands before its children
        above = int(segments.parent[at])
        if above >= 0:
            count[above] += count[at]
            first[above] = min(first[above], first[at])
    return count, first


def _calls(tree: TokenTree, segments: _Segments, member: _Member) -> list[dict[str, Any]]:
    return [
        {
            "call": step.index,
            "agent": step.agent,
            "segment": at if at >= 0 else None,
            "num_prompt_tokens": tree.prompt_len(handle),
            "num_completion_tokens": tree.num_sampled(handle),
            "finish_reason": step.finish_reason,
        }
        for step, handle, at in _ends(tree, segments, member)
    ]


def _sampled(
    tree: TokenTree, members: Sequence[_Member], segments: _Segments
) -> tuple[NDArray[np.bool_], list[float | None]]:
    """Return which tokens a model wrote, and the mean advantage of each segment's sampled ones."""
    by_model = np.zeros(tree.num_tokens, bool)
    total, count = np.zeros(tree.num_tokens), np.zeros(tree.num_tokens, np.int64)
    for member in members:
        steps = () if member.rollout is None else member.rollout.calls
        for step, handle in zip(steps, member.handles, strict=True):
            at = places(tree, handle, tree.num_sampled(handle))
            by_model[at] = True
            if member.rollout is None or member.trained is None:
                continue
            paid = sampled_facts(member.rollout.tree, step, member.trained)["advantage"]
            total[at] += paid
            count[at] += 1
    # `reduceat` of no segments is an error.
    if not len(segments.start):
        return by_model, []
    sums = np.add.reduceat(total, segments.start)
    counts = np.add.reduceat(count, segments.start)
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return by_model, [value / number if number else None for value, number in pairs]


def _said(
    tree: TokenTree,
    by_model: NDArray[np.bool_],
    segments: _Segments,
    at: int,
    tokenizer: RunTokenizer | None,
) -> dict[str, Any]:
    start, end = int(segments.start[at]), int(segments.end[at])
    ids, authors = tree.arena.ids[start:end], _authors(by_model[start:end])
    if tokenizer is None:
        return {"authors": authors, "pieces": None, "ids": ids[:MAX_SHOWN_TOKENS].tolist()}
    pieces, done = [], 0
    for author, size in authors:
        pieces.append({"author": author, "text": _text(ids[done : done + size], tokenizer)})
        done += size
    return {"authors": authors, "pieces": pieces}


def _text(ids: IntArray, tokenizer: RunTokenizer) -> str:
    left_out = len(ids) - MAX_SHOWN_TOKENS
    if left_out <= 0:
        return tokenizer.decode(ids.tolist())
    half = MAX_SHOWN_TOKENS // 2
    first, last = (tokenizer.decode(part.tolist()) for part in (ids[:half], ids[-half:]))
    return f"{first}\n… {left_out:,} tokens …\n{last}"


def _authors(by_model: NDArray[np.bool_]) -> list[list[Any]]:
    """Return who wrote a segment, as `[author, how many tokens]` in order."""
    cuts = [0, *(np.flatnonzero(np.diff(by_model)) + 1).tolist(), len(by_model)]
    names = ("environment", "model")
    return [[names[int(by_model[low])], high - low] for low, high in pairwise(cuts)]


def _shared(segments: _Segments, inside: list[list[int]], num_members: int) -> int:
    """Return how many tokens all members begin with."""
    lengths = segments.end - segments.start
    return int(sum(lengths[at] for at, members in enumerate(inside) if len(members) == num_members))


def _parting(segments: _Segments, inside: list[list[int]]) -> int | None:
    """Return the first segment behind which its members go different ways."""
    after: dict[int, list[int]] = {}
    for at, parent in enumerate(segments.parent.tolist()):
        after.setdefault(parent, []).append(at)
    for at, members in enumerate(inside):
        ways = {tuple(inside[child]) for child in after.get(at, ())}
        if len(members) > 1 and len(ways) > 1:
            return at
    return None


def _member_advantage(trained: TrainedRollout | None) -> float | None:
    if trained is None or not trained.num_tokens:
        return None
    return float(trained.advantage.astype(np.float64).mean())


def _above(reward: float | None, middle: float | None) -> float | None:
    return None if reward is None or middle is None else reward - middle


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _reuse_factor(tree: TokenTree) -> float | None:
    total = sum(tree.path_len(call) for call in range(tree.num_calls))
    return total / tree.num_tokens if tree.num_tokens else None
