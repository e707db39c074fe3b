"""Rollouts aligned as one tree by token id: the group lens, and the tree picture of a rollout.

The calls of all rollouts are merged into one `TokenTree`, so a prefix that several share is in it
once. A segment is a piece of the tree that the same calls go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.insight.page.pages import Offset
from rolltree.insight.page.token_lens import one_rollout
from rolltree.records.token_rows import (
    mean_advantage,
    places,
    sampled_facts,
    state_of,
    trained_tokens,
)
from rolltree.records.tokenizer import RunTokenizer, shown_tokenizer
from rolltree.samples.resolve import ResolvedRollout, ResolvedStep, resolve_rollout
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.tokens import TokenTree
from rolltree.values.errors import ConfigError, UnknownName
from rolltree.values.estimate import mean
from rolltree.values.types import IntArray

# Of a longer segment, only the text of the beginning and the end is shown.
MAX_SHOWN_TOKENS = 2_000
_OF_MEMBER = (
    *("index_in_group", "reward", "status", "error_type", "truncated", "stop_condition"),
    "num_completion_tokens",
)


@dataclass(frozen=True, slots=True)
class _Member:
    """One rollout of the tree."""

    row: StoredRollout
    trained: TrainedRollout | None
    # None if it failed before its first call.
    rollout: ResolvedRollout | None
    # Its calls, each with its handle in the common tree.
    calls: tuple[tuple[ResolvedStep, int], ...]

    @property
    def name(self) -> dict[str, Any]:
        return {
            "request_id": self.row.request_id,
            "trajectory_index": self.row.trajectory_index,
            "agent": self.row.agent,
        }

    @property
    def advantage(self) -> float | None:
        """The mean over its sampled tokens; None if training did not record them."""
        return None if self.trained is None else mean_advantage(self.trained)


class _CommonTree:
    """The calls of several rollouts in one tree, cut into segments.

    Attributes:
        start, end: int32 `[_S]`, the bounds of each segment in the arena, parents first.
        parent: int32 `[_S]`, the segment above; -1 for the root.
        depth: int32 `[_S]`, how many tokens are above the segment.
        of: int32 `[_T]`, the segment of each token of the arena.
        by_model: bool `[_T]`, which tokens a model wrote.
        advantages: the mean over each segment's trained tokens; None without any.
    """

    def __init__(self, run: Run, rows: Sequence[StoredRollout], *, trained: bool = True) -> None:
        # Merging puts equal prefixes of different rollouts in one place, and so aligns them.
        self.tree = TokenTree()
        self.members = [self._add(run, row, trained) for row in rows]
        self._cut()
        self._mark_sampled()

    def _add(self, run: Run, row: StoredRollout, trained: bool) -> _Member:
        state = state_of(row)
        if state is None:
            return _Member(row, None, None, ())
        rollout = resolve_rollout(0, state, skip_invalid=True)
        first = self.tree.merge(rollout.tree)
        calls = tuple((step, first + step.handle) for step in rollout.calls)
        return _Member(row, trained_tokens(run, row) if trained else None, rollout, calls)

    def _cut(self) -> None:
        """Cut the tree where runs begin, where branches leave, and where calls end."""
        arena = self.tree.arena
        parents = np.array(arena.run_parent, np.int32)
        starts = np.array(arena.run_start, np.int32)
        ends = np.array(self.tree.calls.end_token, np.int32)
        # One cell more than tokens, for a cut after the last token, which is dropped below.
        cut = np.zeros(arena.num_tokens + 1, bool)
        cut[starts] = True
        cut[parents[parents >= 0] + 1] = True
        cut[ends[ends >= 0] + 1] = True
        cut = cut[: arena.num_tokens]
        self.start = start = np.flatnonzero(cut).astype(np.int32)
        self.end = np.append(start[1:], arena.num_tokens).astype(np.int32)[: len(start)]
        self.of = (np.cumsum(cut) - 1).astype(np.int32)
        run_of = np.searchsorted(starts, start, side="right") - 1
        is_head = starts[run_of] == start
        above = np.where(is_head, parents[run_of], start - 1)
        self.parent = np.where(above >= 0, self.of[above], -1).astype(np.int32)
        depth = np.array(arena.run_depth, np.int32)[run_of] + start - starts[run_of]
        self.depth = depth.astype(np.int32)

    def _mark_sampled(self) -> None:
        self.by_model = np.zeros(self.tree.num_tokens, bool)
        total, count = np.zeros(self.tree.num_tokens), np.zeros(self.tree.num_tokens, np.int64)
        for member in self.members:
            for step, handle in member.calls:
                at = places(self.tree, handle, self.tree.num_sampled(handle))
                self.by_model[at] = True
                if member.rollout is not None and member.trained is not None:
                    facts = sampled_facts(member.rollout.tree, step, member.trained)
                    total[at] += facts["advantage"]
                    count[at] += 1
        pairs = zip(self._sums(total).tolist(), self._sums(count).tolist(), strict=True)
        self.advantages = [value / number if number else None for value, number in pairs]

    def _sums(self, values: NDArray[Any]) -> NDArray[Any]:
        # `reduceat` of no segments is an error.
        return np.add.reduceat(values, self.start) if len(self.start) else values

    def num_sampled(self) -> list[int]:
        """Return how many tokens of each segment a model wrote."""
        return [int(number) for number in self._sums(self.by_model.astype(np.int64))]

    def ends(self, member: _Member) -> list[tuple[ResolvedStep, int, int]]:
        """Return a member's calls with their handles and the segments they end in (-1: none)."""
        found = [(step, handle, self.tree.calls.end_token[handle]) for step, handle in member.calls]
        return [(step, at, int(self.of[token]) if token >= 0 else -1) for step, at, token in found]

    def path(self, member: _Member) -> list[int]:
        """Return the segments of all calls of a rollout, each once, in the order of the calls."""
        path: dict[int, None] = {}
        for _, _, at in self.ends(member):
            new: list[int] = []
            while at >= 0 and at not in path:
                new.append(at)
                at = int(self.parent[at])
            path |= dict.fromkeys(reversed(new))
        return list(path)

    def passing(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return how many calls go through each segment, and the first, as member and call."""
        count = [0] * len(self.start)
        first = [(len(self.members), 0)] * len(self.start)  # never
        for index, member in enumerate(self.members):
            for step, _, at in self.ends(member):
                if at >= 0:
                    count[at] += 1
                    first[at] = min(first[at], (index, step.index))
        for at in range(len(count) - 1, 0, -1):  # a parent stands before its children
            above = int(self.parent[at])
            if above >= 0:
                count[above] += count[at]
                first[above] = min(first[above], first[at])
        return count, first

    def calls(self, member: _Member) -> list[dict[str, Any]]:
        """Return the calls of a member with the segments that they end in."""
        return [
            {
                "call": step.index,
                "agent": step.agent,
                "segment": at if at >= 0 else None,
                "num_prompt_tokens": self.tree.prompt_len(handle),
                "num_completion_tokens": self.tree.num_sampled(handle),
                "finish_reason": step.finish_reason,
            }
            for step, handle, at in self.ends(member)
        ]

    def words(self, at: int, tokenizer: RunTokenizer | None) -> dict[str, Any]:
        """Return a segment's authors, as `[author, number of tokens]` in order, and its texts."""
        start, end = int(self.start[at]), int(self.end[at])
        ids, by_model = self.tree.arena.ids[start:end], self.by_model[start:end]
        cuts = [0, *(np.flatnonzero(np.diff(by_model)) + 1).tolist(), end - start]
        parts = [
            ("model" if by_model[low] else "environment", ids[low:high])
            for low, high in pairwise(cuts)
        ]
        authors = [[author, len(part)] for author, part in parts]
        if tokenizer is None:
            return {"authors": authors, "pieces": None, "ids": ids[:MAX_SHOWN_TOKENS].tolist()}
        pieces = [{"author": author, "text": _text(part, tokenizer)} for author, part in parts]
        return {"authors": authors, "pieces": pieces}

    @property
    def reuse_factor(self) -> float | None:
        """The tokens of all calls divided by the tokens of the tree."""
        total = sum(self.tree.path_len(call) for call in range(self.tree.num_calls))
        return total / self.tree.num_tokens if self.tree.num_tokens else None


def _group(run: Run, group_id: str) -> list[StoredRollout]:
    """Return the rollouts of a group.

    Raises:
        UnknownName: the run has no such group.
    """
    rows = list(run.rollouts(group_id=group_id))
    if not rows:
        raise UnknownName(f"{run.path} has no group {group_id!r}.")
    return rows


def group_tree(run: Run, id: str, *, agent: str | None = None) -> dict[str, Any]:
    """Return the rollouts of a group as one tree with reward and advantage on each branch.

    With `agent`, only that agent's, which begin with the same prompt; `agents` lists all of them.

    Raises:
        UnknownName: the run has no such group, or the group no such agent.
    """
    every = sorted(_group(run, id), key=lambda row: (row.index_in_group, row.trajectory_index))
    agents = list(dict.fromkeys(row.agent for row in every))
    rows = [row for row in every if agent is None or row.agent == agent]
    if not rows:
        raise UnknownName(f"the group {id!r} has no agent {agent!r}.")
    tree, shown = _CommonTree(run, rows), shown_tokenizer(run)
    paths = [tree.path(member) for member in tree.members]
    inside: list[list[int]] = [[] for _ in tree.start]
    for index, path in enumerate(paths):
        for segment in path:
            inside[segment].append(index)
    lengths = (tree.end - tree.start).tolist()
    first = rows[0]
    return {
        "group_id": id,
        "phase": first.phase,
        "train_step": first.train_step,
        "example": {
            "env_id": first.env_id,
            "task": first.task,
            "example_id": None if first.example_id is None else str(first.example_id),
        },
        "agents": agents,
        "is_trained": any(member.trained is not None for member in tree.members),
        # Delegated rollouts are compared with others of their subtask, not with the group.
        "reward": _mean([row.reward for row in rows if row.parent_rollout is None]),
        # Parents first. `authors` are `[author, tokens]` in order, `pieces` the `author` and `text`
        # of each, without the middle of long ones. Without a tokenizer they are None, and `ids` is
        # given.
        "segments": [
            {
                "parent": int(tree.parent[at]),
                # The number of tokens above it.
                "start": int(tree.depth[at]),
                "num_tokens": lengths[at],
                **tree.words(at, shown),
                # The members that go through it, and the mean reward of the scored ones.
                "members": members,
                "reward": _mean([rows[index].reward for index in members]),
                # The mean over its trained tokens; None without any.
                "advantage": tree.advantages[at],
            }
            for at, members in enumerate(inside)
        ],
        "members": [
            {
                **member.name,
                **{name: getattr(row, name) for name in _OF_MEMBER},
                "advantage": member.advantage,
                # Its segments in the order in which its calls reach them.
                "path": path,
                "calls": tree.calls(member),
            }
            for member, row, path in zip(tree.members, rows, paths, strict=True)
        ],
        # The number of tokens that all members share.
        "shared_tokens": sum(
            size for size, members in zip(lengths, inside, strict=True) if len(members) == len(rows)
        ),
        "num_tokens": tree.tree.num_tokens,
        "reuse_factor": tree.reuse_factor,
    }


def tree_picture(
    run: Run, id: str | None = None, index: Offset = 0, *, group: str | None = None
) -> dict[str, Any]:
    """Return the token tree of a rollout, or of a group, to draw to scale.

    Raises:
        ConfigError: neither or both are named.
        UnknownName: the run has no such rollout or group.
    """
    if (id is None) == (group is None):
        raise ConfigError("a tree belongs to a rollout or a group. Give either id or group.")
    rows = [one_rollout(run, str(id), index)] if group is None else _group(run, group)
    tree = _CommonTree(run, rows, trained=False)
    num_calls, first = tree.passing()
    return {
        "members": [member.name for member in tree.members],
        "segments": [
            {
                "parent": int(tree.parent[index]),
                "start_depth": int(tree.depth[index]),
                "length": int(tree.end[index] - tree.start[index]),
                # How many of its tokens the model wrote, and how many calls go through it.
                "sampled": sampled,
                "calls": num_calls[index],
                # Member, call and the position of its first token there, for the token lens.
                "at": [*first[index], int(tree.depth[index])],
            }
            for index, sampled in enumerate(tree.num_sampled())
        ],
        "num_tokens": tree.tree.num_tokens,
        "num_calls": tree.tree.num_calls,
        "reuse_factor": tree.reuse_factor,
    }


def _text(ids: IntArray, tokenizer: RunTokenizer) -> str:
    left_out = len(ids) - MAX_SHOWN_TOKENS
    if left_out <= 0:
        return tokenizer.decode(ids.tolist())
    half = MAX_SHOWN_TOKENS // 2
    first, last = (tokenizer.decode(part.tolist()) for part in (ids[:half], ids[-half:]))
    return f"{first}\n… {left_out:,} tokens …\n{last}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None
