"""From a protocol's rollout to the state that the rest of the project reads.

Pure apart from writing into the state and its steps. It knows `RolloutBuilder` and the keys of
`State`. It leaves out timing and the rendered completion, which are the environment's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltree.protocols import RolloutBuilder
from rolltree.steps import INCOMPLETE, AgentStep, EnvironmentStep, Rollout, Step
from rolltree.types import State


def fill_state(state: State, builder: RolloutBuilder) -> None:
    """Write one rollout into a state.

    `environment_steps` keeps the world's part as plain data; `metrics` counts turns, model calls,
    answers without an action and answers that were cut off.
    """
    rollout = builder.build()
    state["trajectory"] = builder.agent.trajectory
    _write_step_rewards(rollout)
    early = float(rollout.meta.get("early_reward", 0.0))
    if early and state["trajectory"]:
        state["trajectory"][0]["reward"] += early
    failed = rollout.error is not None
    state.update(
        agent=rollout.agent,
        rollout_id=rollout.rollout_id,
        parent_rollout=rollout.parent_rollout,
        parent_step=_parent_call(builder),
        depth=rollout.depth,
        rollout_meta=dict(rollout.meta),
        environment_steps=[_plain(step) for step in rollout.environment_steps],
        reward=None if failed else rollout.reward + early,
        has_step_rewards=True,
        error=rollout.error,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        truncation_reason=None if not rollout.truncated else str(rollout.truncation_reason),
        is_completed=not failed and builder.over,
        stop_condition=_stop_condition(rollout),
        metrics=_metrics(rollout),
    )
    for key in ("subtask", "result", "seat"):
        if key in rollout.meta:
            state[key] = rollout.meta[key]
    if state["trajectory"]:
        state["prompt"] = list(state["trajectory"][0]["prompt"])


def _write_step_rewards(rollout: Rollout) -> None:
    """Give each call what the agent gave it, and the turn's last call what the world gave."""
    for step in rollout.steps:
        if isinstance(step, AgentStep):
            step.record["reward"] = step.reward
    for step in rollout.environment_steps:
        if step.agent_steps:
            call = rollout.steps[step.agent_steps[-1]]
            assert isinstance(call, AgentStep)
            call.record["reward"] = (call.record["reward"] or 0.0) + step.reward


def _parent_call(builder: RolloutBuilder) -> int | None:
    """Return the parent's model call that asked for this rollout, counted in model calls."""
    if builder.parent is None or builder.parent_step is None:
        return None
    return call_index(builder.parent.steps, builder.parent_step)


def call_index(steps: Sequence[Step], index: int) -> int:
    """Return which model call the step at `index` is: steps of the world are not counted."""
    return sum(isinstance(step, AgentStep) for step in steps[:index])


def _plain(step: EnvironmentStep) -> dict[str, Any]:
    return {
        "turn": step.turn,
        "action": step.action,
        "next_obs": step.next_obs,
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": dict(step.info),
    }


def _stop_condition(rollout: Rollout) -> str | None:
    if rollout.truncated:
        return str(rollout.truncation_reason)
    return "terminated" if rollout.terminated else None


def _metrics(rollout: Rollout) -> dict[str, float]:
    calls = rollout.agent_steps
    turns = [step for step in calls if step.action_target == "env"]
    count = max(1, len(turns))
    return {
        "num_turns": float(len(turns)),
        "num_model_calls": float(len(calls)),
        "parse_failure_rate": sum(step.parse_failed for step in turns) / count,
        "incomplete_rate": sum(bool(step.info.get(INCOMPLETE)) for step in turns) / count,
    }
