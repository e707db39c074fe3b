"""What is left of a rollout when it was checked, for credit and for the checks of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from rolltree.tokens import TokenTree
from rolltree.types import RolloutResult

_CREDIT_FIELDS = (
    *("reward", "agent", "rollout_id", "parent_rollout", "parent_step", "subtask", "truncated"),
    *("truncation_reason", "has_step_rewards", "bootstrap_value"),
)
_CREDIT_EXTRAS = ("turn", "num_completion_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What later checks need of one call: its place, and the engine's numbers."""

    handle: int
    versions: Any
    logprobs: Any
    mask: Any


@dataclass(slots=True)
class RolloutFacts:
    """What is left of a rollout when it was checked: enough for credit and for counting.

    `fingerprint` is the same for two rows only if one is a copy of the other. `state` has what
    credit reads of it; None if there is no trajectory.
    """

    request_id: str
    trajectory_index: int
    num_trajectories: int
    group_id: str
    index_in_group: int
    phase: str
    train_step: int | None
    failed: bool
    reward: float | None
    fingerprint: tuple[Any, ...] | None = None
    parent_rollout: str | None = None
    rollout_id: str | None = None
    error_type: str | None = None
    num_sampled: int = 0
    min_version: int | None = None
    max_version: int | None = None
    state: dict[str, Any] | None = None
    advantage: float | None = None
    calls: tuple[CallFacts | None, ...] = ()


def credit_state(
    record: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    tree: TokenTree,
    handles: Sequence[int | None],
) -> dict[str, Any]:
    """Return of a rollout's record what credit reads of a state."""
    fields = record["state"]["fields"]
    state = {name: fields[name] for name in _CREDIT_FIELDS if name in fields}
    state["error"] = record["state"]["error"].get("record")
    state["trajectory"] = [
        {
            "reward": step["reward"],
            "advantage": None,
            "extras": {name: (step["extras"] or {}).get(name) for name in _CREDIT_EXTRAS},
            "tokens": None
            if handle is None
            else {
                "prompt_ids": range(tree.prompt_len(handle)),
                "completion_ids": range(tree.num_sampled(handle)),
            },
        }
        for step, handle in zip(steps, handles, strict=True)
    ]
    return state


def as_results(facts: Sequence[RolloutFacts]) -> list[RolloutResult]:
    """Return the results that credit is assigned to, from the facts of all their trajectories."""
    by_request: dict[str, list[RolloutFacts]] = {}
    for item in facts:
        by_request.setdefault(item.request_id, []).append(item)
    results = []
    for request_id, members in by_request.items():
        members.sort(key=lambda item: item.trajectory_index)
        request = SimpleNamespace(request_id=request_id, group_id=members[0].group_id)
        states = tuple(item.state for item in members if item.state is not None)
        error = members[0].error_type if any(item.failed for item in members) else None
        results.append(RolloutResult(cast(Any, request), cast(Any, states), cast(Any, error)))
    return results
