"""Reads a trajectory once: its token tree, its calls in order, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolltree.errors import TokenError
from rolltree.samples.truncation import (
    TruncationEffect,
    TruncationPolicy,
    own_truncation,
    truncation_effect,
)
from rolltree.tokens import StepTokens, TokenTree, Trajectory, insert_step, peek
from rolltree.types import SampleOrigin, State, TrajectoryStep

NO_TOKENS = -1
Advantages: TypeAlias = Sequence[float] | NDArray[Any]
"""One value per step of a trajectory."""


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One step, with its index in the trajectory and its call's handle in the tree.

    The handle is `NO_TOKENS` if the step has none. `advantage` is the one that was passed in, else
    the step's, else the state's, else None.
    """

    index: int
    handle: int
    agent: str
    turn: int | None
    advantage: float | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ResolvedRollout:
    """One trajectory: `steps` has every step, `calls` those whose tokens are in `tree`.

    `weight` multiplies the loss weight of every token; it is 0 for a rollout that failed or is
    masked. `truncated` and its reason are the episode's own.
    """

    index: int
    rollout_id: str
    tree: TokenTree
    steps: tuple[ResolvedStep, ...]
    calls: tuple[ResolvedStep, ...]
    reward: float | None
    terminated: bool
    truncated: bool
    truncation_reason: str | None
    failed: bool
    effect: TruncationEffect

    @property
    def weight(self) -> float:
        """The factor of every token's loss weight, 1 or 0."""
        return float(self.effect.in_loss and not self.failed)

    def origins(self, calls: Sequence[ResolvedStep]) -> list[SampleOrigin]:
        """Return the origins of a sample with these calls: one per agent, in order."""
        by_agent: dict[str, list[ResolvedStep]] = {}
        for call in calls:
            by_agent.setdefault(call.agent, []).append(call)
        return [
            SampleOrigin(
                rollout_id=self.rollout_id,
                calls=tuple(call.index for call in group),
                agent=agent,
                reward=self.reward,
                terminated=self.terminated,
                truncated=self.truncated,
                truncation_reason=self.truncation_reason,
                finish_reason=group[-1].finish_reason,
            )
            for agent, group in by_agent.items()
        ]


def resolve_rollout(
    index: int,
    trajectory: State | Sequence[TrajectoryStep],
    effect: TruncationEffect | None = None,
    advantages: Advantages | None = None,
) -> ResolvedRollout:
    """Read a state or a plain list of steps; without an `effect`, truncation changes nothing.

    If the tokens of all steps are views of one tree, that tree is used. If there are plain lists,
    assigned token keys or views of several trees, all steps are inserted into a new tree.

    Raises:
        TokenError: a step's tokens contradict themselves; the message names the step.
    """
    state: Mapping[str, Any] = trajectory if isinstance(trajectory, Mapping) else {}
    trajectory_steps = state["trajectory"] if isinstance(trajectory, Mapping) else trajectory
    tree, handles = resolve_tokens(index, trajectory_steps)
    fallback = _number(state.get("advantage"))
    steps: list[ResolvedStep] = []
    extras: Mapping[str, Any] = {}
    for position, (step, handle) in enumerate(zip(trajectory_steps, handles, strict=True)):
        # `peek`, so that reading does not build and keep the lists of every step.
        extras = peek(step, "extras") or {}
        own = _number(step.get("advantage") if advantages is None else advantages[position])
        agent, turn = extras.get("agent") or "", extras.get("turn")
        if handle >= 0:
            agent = agent or tree.agent(handle)
            turn = tree.turn(handle) if turn is None else turn
        reason = _text(extras.get("finish_reason"))
        steps.append(
            ResolvedStep(position, handle, agent, turn, fallback if own is None else own, reason)
        )
    truncated, reason = own_truncation(trajectory)
    return ResolvedRollout(
        index=index,
        rollout_id=str(state.get("rollout_id") or state.get("request_id") or index),
        tree=tree,
        steps=tuple(steps),
        calls=tuple(step for step in steps if step.handle >= 0),
        reward=_number(state.get("reward")),
        # For a plain list of steps, the flag of the last step.
        terminated=bool(state.get("terminated", extras.get("terminated", False))),
        truncated=truncated,
        truncation_reason=reason,
        failed=state.get("error") is not None,
        effect=effect or truncation_effect(trajectory, TruncationPolicy()),
    )


def resolve_tokens(index: int, steps: Sequence[Any]) -> tuple[TokenTree, list[int]]:
    """Return one tree with the calls of all steps, and each step's handle or `NO_TOKENS`."""
    return _shared_tree(steps) or _fresh_tree(index, steps)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shared_tree(steps: Sequence[Any]) -> tuple[TokenTree, list[int]] | None:
    """Return the tree of which all steps are unchanged views, with their handles, or None."""
    tree = steps.tree if isinstance(steps, Trajectory) else None
    handles: list[int] = []
    for step in steps:
        tokens = peek(step, "tokens")
        if tokens is None:
            handles.append(NO_TOKENS)
            continue
        # An edit is only in the step; the tree has the recorded values.
        if not isinstance(tokens, StepTokens) or not tokens.as_recorded:
            return None
        if tree is None:
            tree = tokens.tree
        # Handles are valid only in their own tree.
        if tokens.tree is not tree:
            return None
        handles.append(tokens.call)
    return (tree or TokenTree(), handles)


def _fresh_tree(index: int, steps: Sequence[Any]) -> tuple[TokenTree, list[int]]:
    tree = TokenTree()
    handles: list[int] = []
    for position, step in enumerate(steps):
        tokens = peek(step, "tokens")
        try:
            if tokens is None:
                handles.append(NO_TOKENS)
            elif isinstance(tokens, StepTokens):
                handles.append(_insert_view(tree, tokens))
            else:
                handles.append(insert_step(tree, step))
        except TokenError as error:
            raise TokenError(f"step {position} of rollout {index}: {error}") from error
    return tree, handles


def _insert_view(tree: TokenTree, tokens: StepTokens) -> int:
    """Insert a recorded call with the token keys that were assigned later.

    Versions and temperatures stay as recorded. So do streams, unless the ids were changed, since
    they describe the recorded ids.
    """
    recorded, call = tokens.tree, tokens.call
    if tokens.as_recorded:
        return tree.copy_call(recorded, call)
    new = {key: tokens[key] for key in tokens.assigned}
    values = recorded.values(call)
    other_ids = "completion_ids" in new or "prompt_ids" in new
    if other_ids and len(tokens["completion_ids"]) != recorded.num_sampled(call):
        # The recorded values do not fit the new number of tokens, so all tokens get the oldest
        # version and the lowest temperature.
        for name in ("version", "temperature"):
            values[name] = float(np.min(values[name]))

    def given(key: str, name: str) -> Any:
        """Return the assigned values (None for an empty list), else the recorded ones."""
        if key not in new:
            return values[name]
        # In verifiers' steps, an empty list means that there are no values.
        return new[key] if new[key] is not None and len(new[key]) else None

    return tree.insert(
        new.get("prompt_ids", recorded.prompt_ids(call)),
        new.get("completion_ids", recorded.completion_ids(call)),
        logprobs=given("completion_logprobs", "logprob"),
        temperature=values["temperature"],
        versions=values["version"],
        mask=given("completion_mask", "weight"),
        prompt_mask=given("prompt_mask", "prompt_mask"),
        agent=recorded.agent(call),
        turn=recorded.turn(call),
        # Streams describe the recorded ids.
        streams={} if other_ids else recorded.streams(call),
    )
