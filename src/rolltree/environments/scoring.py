"""Scoring the rollouts of one episode, after playing and in rescoring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from rolltree._helpers.tasks import contained
from rolltree.environments.rubrics import Rubric, settle_rewards, write_failure
from rolltree.rollouts import current_episode
from rolltree.rollouts.settle import settle_state
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
            try:
                with contained():
                    await rubric.score_rollout(state)
                settle_rewards(state, rubric)
                is_own = type(rubric).score_rollout is Rubric.score_rollout
                if state.reward is None and not is_own and not state.get("scoring_errors"):
                    raise ValueError(f"{type(rubric).__name__}.score_rollout left no reward")
            except Exception as error:  # noqa: BLE001  an overridden rubric may raise: it is data
                settle_state(state)
                write_failure([state], rubric, error)
