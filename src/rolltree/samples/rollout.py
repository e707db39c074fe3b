"""One rollout as the sample makers see it: its token tree, its calls and how it ended.

Knows `State`, plain lists of spec-1 steps, and the token tree. Leaves out how calls are grouped
into samples and what a loss does with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltree.errors import TokenError
from rolltree.tokens import StepTokens, TokenTree, Trajectory, insert_step, peek
from rolltree.types import SampleOrigin, State, TrajectoryStep


@dataclass(frozen=True, slots=True)
class Call:
    """One model call with tokens: `step` is its index in the trajectory, `handle` in the tree.

    `advantage` is None when neither the step nor the rollout has one. `terminated` and `truncated`
    are the step's own flags.
    """

    step: int
    handle: int
    agent: str
    turn: int | None
    advantage: float | None
    reward: float | None
    finish_reason: str | None
    terminated: bool
    truncated: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory, resolved: every call with tokens lives in `tree`.

    `credit[step]` is the advantage of each step, tokens or not: turn samples take it from a turn's
    last step. `trains` is False for a rollout that failed.
    """

    index: int
    rollout_id: str
    tree: TokenTree
    calls: tuple[Call, ...]
    turns: tuple[tuple[str, int | None], ...]
    credit: tuple[float | None, ...]
    reward: float | None
    terminated: bool
    truncated: bool
    truncation_reason: str | None
    trains: bool
    steps_without_tokens: tuple[int, ...] = field(default=())

    def origin(self, calls: Sequence[Call]) -> SampleOrigin:
        """Return the origin of a sample made of these calls, which share one agent."""
        return SampleOrigin(
            rollout_id=self.rollout_id,
            calls=tuple(call.step for call in calls),
            agent=calls[-1].agent,
            reward=self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            truncation_reason=self.truncation_reason,
            finish_reason=calls[-1].finish_reason,
        )


def resolve(index: int, trajectory: State | Sequence[TrajectoryStep]) -> Rollout:
    """Read a state, or a plain list of steps, into a `Rollout`.

    Steps whose tokens are views on one tree use that tree as it is. Steps with plain lists, with
    assigned token keys or with views on several trees are inserted into a fresh tree.

    Raises:
        TokenError: a step's tokens contradict themselves; the message names the step.
    """
    state: Mapping[str, Any] = trajectory if isinstance(trajectory, Mapping) else {}
    steps = state["trajectory"] if isinstance(trajectory, Mapping) else trajectory
    tree, handles = _shared_tree(steps) or _fresh_tree(index, steps)
    fallback = _number(state.get("advantage"))
    credit: list[float | None] = []
    turns: list[tuple[str, int | None]] = []
    calls: list[Call] = []
    for position, (step, handle) in enumerate(zip(steps, handles, strict=True)):
        extras = step.get("extras") or {}
        own = _number(step.get("advantage"))
        credit.append(fallback if own is None else own)
        agent, turn = extras.get("agent") or "", extras.get("turn")
        if handle is not None:
            agent = agent or tree.agent(handle)
            turn = tree.turn(handle) if turn is None else turn
            calls.append(
                Call(
                    step=position,
                    handle=handle,
                    agent=agent,
                    turn=turn,
                    advantage=credit[-1],
                    reward=_number(step.get("reward")),
                    finish_reason=_text(extras.get("finish_reason")),
                    terminated=bool(extras.get("terminated", False)),
                    truncated=bool(extras.get("truncated", False)),
                )
            )
        turns.append((agent, turn))
    last = (steps[-1].get("extras") or {}) if len(steps) else {}
    return Rollout(
        index=index,
        rollout_id=str(state.get("rollout_id") or state.get("request_id") or index),
        tree=tree,
        calls=tuple(calls),
        turns=tuple(turns),
        credit=tuple(credit),
        reward=_number(state.get("reward")),
        terminated=bool(state.get("terminated", last.get("terminated", False))),
        truncated=bool(state.get("truncated", last.get("truncated", False))),
        truncation_reason=_text(state.get("truncation_reason") or last.get("truncation_reason")),
        trains=state.get("error") is None,
        steps_without_tokens=tuple(i for i, handle in enumerate(handles) if handle is None),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shared_tree(steps: Sequence[Any]) -> tuple[TokenTree, list[int | None]] | None:
    """Return the one tree that all recorded steps are views on, or None."""
    tree = steps.tree if isinstance(steps, Trajectory) else None
    handles: list[int | None] = []
    for step in steps:
        tokens = peek(step, "tokens")
        if tokens is None:
            handles.append(None)
            continue
        if not isinstance(tokens, StepTokens) or not tokens.as_recorded:
            return None
        if tree is None:
            tree = tokens.tree
        if tokens.tree is not tree:
            return None
        handles.append(tokens.call)
    return (tree or TokenTree(), handles)


def _fresh_tree(index: int, steps: Sequence[Any]) -> tuple[TokenTree, list[int | None]]:
    tree = TokenTree()
    handles: list[int | None] = []
    for position, step in enumerate(steps):
        tokens = peek(step, "tokens")
        if tokens is None:
            handles.append(None)
        elif isinstance(tokens, StepTokens) and tokens.as_recorded:
            handles.append(tree.copy_call(tokens.tree, tokens.call))
        else:
            try:
                handles.append(insert_step(tree, step))
            except TokenError as error:
                raise TokenError(f"step {position} of rollout {index}: {error}") from error
    return tree, handles
