"""Scoring the rollouts of one episode, after playing and in rescoring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from rolltree._helpers.tasks import contained, undo_own_cancellation
from rolltree.environments.rubrics import Rubric, settle_rewards, write_failure
from rolltree.rollouts import current_episode
from rolltree.rollouts.settle import KeptParts, settle_state
from rolltree.values.types import State


async def score_episode(rubric: Rubric, states: Sequence[State]) -> None:
    """Score the rollouts of one episode that have not failed, each alone, in place.

    If the rubric compares the members of a group, it does nothing: `score_group` is called later.
    """
    if rubric.has_group_rewards:
        return
    episode = current_episode()
    with nullcontext() if episode is None else episode.clock.excluded():
        for state in states:
            if state.error is not None:
                continue
            is_own = type(rubric).score_rollout is Rubric.score_rollout
            before = None if is_own else KeptParts(state)
            try:
                with contained():
                    await rubric.score_rollout(state)
                if not is_own:
                    await undo_own_cancellation()
                settle_rewards(state, rubric)
                if before is not None:
                    before.settle()
                check_scored([state], rubric, "score_rollout")
            except Exception as error:  # noqa: BLE001  an overridden rubric may raise: it is data
                settle_state(state)
                write_failure([state], rubric, error)


def check_scored(states: Sequence[State], rubric: Rubric, method: str) -> None:
    """Count rollouts as 0 whose rewards an override of a rubric's method left out."""
    if getattr(type(rubric), method).__module__.startswith("rolltree."):
        return
    for state in states:
        if state.reward is None and state.error is None and not state.get("scoring_errors"):
            left = ValueError(f"{type(rubric).__name__}.{method} left no reward")
            write_failure([state], rubric, left)
