"""Reads a trajectory once: its token tree, its calls in order, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.truncation import (
    TruncationEffect,
    TruncationPolicy,
    own_truncation,
    truncation_effect,
)
from rolltree.tokens import StepTokens, TokenTree, Trajectory, check_ids, insert_step, peek
from rolltree.values.errors import TokenError
from rolltree.values.types import SampleOrigin, State, TrajectoryStep

NO_TOKENS = -1
Advantages: TypeAlias = Sequence[float] | NDArray[Any]
"""One value per step of a trajectory."""


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One step, with its index in the trajectory and its call's handle in the tree.

    The handle is `NO_TOKENS` if the step has none. `advantage` is the one that was passed in, else
    the step's, else the state's, else None. `changed_sampling`: see the function of that name.
    `left_out`: why its call is not to be trained, if so (design/0027). `problem`: why its tokens
    cannot be used, if it has none for that reason.
    """

    index: int
    handle: int
    agent: str
    turn: int | None
    advantage: float | None
    finish_reason: str | None
    changed_sampling: str | None = None
    left_out: str | None = None
    problem: str | None = None


Group: TypeAlias = list[ResolvedStep]
"""Calls that share a flat sample: the prompt of each extends the call before it, id for id."""


@dataclass(frozen=True, slots=True)
class ResolvedRollout:
    """One trajectory: `steps` has every step, `calls` those whose tokens are in `tree`.

    `source` is the trajectory. `weight` multiplies the loss weight of every token; it is 0 for a
    rollout that failed or is masked. `truncated` and its reason are the episode's own.
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
    source: Sequence[TrajectoryStep]

    @property
    def weight(self) -> float:
        """The factor of every token's loss weight, 1 or 0."""
        return float(self.effect.in_loss and not self.failed)

    def messages(self, index: int, *, with_answer: bool = False) -> list[Mapping[str, Any]]:
        """Return the messages of a step's prompt; none if the prompt is text."""
        listed: list[Mapping[str, Any]] = []
        for name in ("prompt", "completion") if with_answer else ("prompt",):
            part = peek(self.source[index], name)
            if part and not isinstance(part, str) and isinstance(part, Sequence):
                listed += [message for message in part if isinstance(message, Mapping)]
        return listed

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
    *,
    skip_invalid: bool = False,
) -> ResolvedRollout:
    """Read a state or a plain list of steps; without an `effect`, truncation changes nothing.

    If the tokens of all steps are views of one tree, that tree is used. If there are plain lists,
    assigned token keys or views of several trees, all steps are inserted into a new tree.

    With `skip_invalid`, a step whose tokens contradict themselves has none, and its `problem` says
    why.

    Raises:
        TokenError: a step's tokens contradict themselves; the message names the step.
    """
    state: Mapping[str, Any] = trajectory if isinstance(trajectory, Mapping) else {}
    trajectory_steps = state["trajectory"] if isinstance(trajectory, Mapping) else trajectory
    problems: dict[int, str] | None = {} if skip_invalid else None
    tree, handles = resolve_tokens(index, trajectory_steps, problems)
    fallback = _number(state.get("advantage"))
    steps: list[ResolvedStep] = []
    extras: Mapping[str, Any] = {}
    for position, (step, handle) in enumerate(zip(trajectory_steps, handles, strict=True)):
        # `peek`, so that reading does not build and keep the lists of every step.
        extras = peek(step, "extras") or {}
        own = _number(step.get("advantage") if advantages is None else advantages[position])
        agent, turn = _text(extras.get("agent")) or "", extras.get("turn")
        if handle >= 0:
            agent = agent or tree.agent(handle)
            turn = turn if isinstance(turn, int) else tree.turn(handle)
        reason = _text(extras.get("finish_reason"))
        advantage, changed = fallback if own is None else own, _changed_sampling(extras)
        problem = problems.get(position) if problems else None
        marks = changed, _text(extras.get("left_out")), problem
        steps.append(ResolvedStep(position, handle, agent, turn, advantage, reason, *marks))
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
        source=trajectory_steps,
    )


def resolve_tokens(
    index: int, steps: Sequence[Any], problems: dict[int, str] | None = None
) -> tuple[TokenTree, list[int]]:
    """Return one tree with the calls of all steps, and each step's handle or `NO_TOKENS`.

    With `problems`, steps whose tokens contradict themselves have none, and are noted there.
    """
    return _shared_tree(steps) or _fresh_tree(index, steps, problems)


def changed_sampling(step: Any) -> str | None:
    """Return the settings for which a step was not sampled from softmax(logits / T), or None.

    They are those that it was really sampled with, wherever they were set.
    """
    # `peek`, because a step keeps the values that it builds when its keys are read.
    return _changed_sampling(peek(step, "extras") or {})


def _changed_sampling(extras: Mapping[str, Any]) -> str | None:
    temperature, changes = extras.get("temperature", 1.0), extras.get("sampling")
    # Asked for every call of a batch, and nearly all of them are so.
    is_unchanged = changes is None or (type(changes) is dict and not changes)
    if is_unchanged and type(temperature) is float and 0 < temperature < math.inf:
        return None
    return not_the_models_own(temperature, {} if changes is None else changes)


def not_the_models_own(temperature: Any, changes: Any) -> str | None:
    """Return the settings for which a call is not trained, as text, or None.

    The trainer divides logits by the temperature and takes their softmax. Settings that cut tokens
    off, penalise or bias them give different probabilities, so ratios would be wrong.

    Args:
        temperature: the divisor of the logits, a positive number.
        changes: a mapping; see `rolltree.inference.request_fields.distribution_changes`.

    >>> not_the_models_own(0.0, {"top_p": 0.9})
    'temperature = 0.0, top_p = 0.9'
    """
    # An environment may write anything there; how the call was sampled is then unknown.
    if not isinstance(changes, Mapping):
        changes = {"sampling": changes}
    is_known = isinstance(temperature, Real) and 0 < (_number(temperature) or 0.0) < math.inf
    settings = changes if is_known else {"temperature": temperature, **changes}
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items()) or None


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None  # an environment may write anything into a state


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


def _fresh_tree(
    index: int, steps: Sequence[Any], problems: dict[int, str] | None
) -> tuple[TokenTree, list[int]]:
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
        except (TokenError, *_UNREADABLE) as error:
            problem = str(error)
            if not isinstance(error, TokenError):
                problem = f"its tokens cannot be read ({type(error).__name__}: {error})"
            if problems is not None:
                problems[position] = problem
                handles.append(NO_TOKENS)
                continue
            raise TokenError(f"step {position} of rollout {index}: {problem}") from error
    return tree, handles


# Of values that an environment assigned, which may be anything.
_UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)


def _insert_view(tree: TokenTree, tokens: StepTokens) -> int:
    """Insert a recorded call with the token keys that were assigned later.

    Versions and temperatures stay as recorded. So do streams, unless the ids were changed, since
    they describe the recorded ids.
    """
    recorded, call = tokens.tree, tokens.call
    if tokens.as_recorded:
        return tree.copy_call(recorded, call)
    new = {key: tokens[key] for key in tokens.assigned}
    check_ids({"prompt_ids": (), "completion_ids": (), **new})
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
        return new[key] if new[key] is not None and np.size(new[key]) else None

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
