"""What a rollout was rewarded for: its reward functions and weights, apart from other metrics."""

from __future__ import annotations

from typing import Any

from rolltree.store import Run, StoredRollout
from rolltree.store.metric_names import number_of
from rolltree.store.weights import META, noted_weights


def reward_parts(run: Run, row: StoredRollout) -> dict[str, Any]:
    """Return the parts of a rollout's reward, and what else was measured, JSON-ready."""
    weights = noted_weights(
        run.meta.get(META),
        env_id=row.env_id,
        task=row.task,
        agent=row.agent,
        created_at=row.created_at,
    )
    values = {str(name): number_of(value) for name, value in row.metrics.items()}
    paid = {name: w for name, w in (weights or {}).items() if w and name in values}
    functions = [_part(name, values[name], weight) for name, weight in paid.items()]
    return {
        # Whether the run says which metrics are rewarded.
        "is_recorded": weights is not None,
        # Those with a weight: `name`, `value`, `weight`, and `contribution`, their product. A
        # function that failed has neither value nor contribution.
        "functions": functions,
        # The reward minus all contributions: what the world or the form of answers earned, or what
        # a rubric's own method gave. None if the reward or a contribution is not known.
        "rest": None if weights is None else _rest(row.reward, functions),
        # The value of everything else that was measured, by its name.
        "metrics": {name: value for name, value in values.items() if name not in paid},
    }


def _part(name: str, value: float | None, weight: float) -> dict[str, Any]:
    paid = None if value is None else weight * value
    return {"name": name, "value": value, "weight": weight, "contribution": paid}


def _rest(reward: float | None, functions: list[dict[str, Any]]) -> float | None:
    """Return the part of the reward that no function explains, 0 if it is only rounding."""
    paid = [each["contribution"] for each in functions]
    if reward is None or None in paid:
        return None
    # Floats that were summed in a different order leave a rest that no function earned.
    rest = reward - sum(paid)
    return 0.0 if abs(rest) <= 1e-9 * max(1.0, *map(abs, (reward, *paid))) else rest
