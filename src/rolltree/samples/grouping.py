"""Which calls share a flat sample: those of a turn, or as long as the exact prefix holds.

Works on arena indices of the token tree, never on text. Leaves out the arrays (`flat.py`) and the
reasons for a break (`rolltree.tokens.breaks`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from rolltree.samples.rollout import Call, Rollout
from rolltree.tokens import Place, TokenTree

Group = list[Call]


class OpenEnds:
    """The ends of samples that a later prompt may extend, found by walking up from a prompt.

    An end is an arena index. The deepest open end on a prompt's path is the longest open prefix.
    """

    __slots__ = ("_by_run", "_tree")

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._by_run: dict[int, list[tuple[int, int]]] = {}

    def open(self, end: Place, sample: int) -> None:
        """Let `sample` be extended at `end`."""
        if end.run >= 0:
            insort(self._by_run.setdefault(end.run, []), (end.token, sample))

    def take(self, prompt_end: Place) -> int | None:
        """Close the deepest open end on the path to `prompt_end`; return its sample.

        Of several samples with the same end the one opened last is taken.
        """
        arena, by_run = self._tree.arena, self._by_run
        token, run = prompt_end
        parents, parent_runs = arena.run_parent, arena.run_parent_run
        while run >= 0:
            ends = by_run.get(run)
            if ends:
                position = bisect_right(ends, (token, 1 << 62))
                if position:
                    _, sample = ends.pop(position - 1)
                    return sample
            token, run = parents[run], parent_runs[run]
        return None


def by_prefix(rollout: Rollout, calls: Sequence[Call]) -> list[Group]:
    """Best-effort interleaving (spec 3): a call joins the longest open sample its prompt extends.

    An empty suffix is a hit. A prompt that extends no open sample opens a new one; older samples
    stay open.
    """
    tree = rollout.tree
    ends = OpenEnds(tree)
    groups: list[Group] = []
    for call in calls:
        sample = ends.take(tree.calls.prompt_end(call.handle))
        if sample is None:
            sample = len(groups)
            groups.append([])
        groups[sample].append(call)
        ends.open(tree.calls.end(call.handle), sample)
    return groups


def turn_calls(rollout: Rollout) -> list[tuple[Group, float | None]]:
    """Return each turn's calls and the credit of the turn's last step, in order of first call.

    A turn is an agent and a turn number; a call without a turn number is a turn of its own.
    """
    turns: dict[tuple[str, int | None, int], Group] = {}
    credit: dict[tuple[str, int | None, int], float | None] = {}
    by_position = {call.step: call for call in rollout.calls}
    for step, (agent, turn) in enumerate(rollout.turns):
        key = (agent, turn, step if turn is None else -1)
        credit[key] = rollout.credit[step]
        if step in by_position:
            turns.setdefault(key, []).append(by_position[step])
    return [(calls, credit[key]) for key, calls in turns.items()]
