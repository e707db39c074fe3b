"""The part of stored rollouts that credit and the metrics of a step read.

It is so small that a whole run fits into memory.
"""

from __future__ import annotations

from typing import Any

from rolltree.tokens import StepTokens, peek
from rolltree.values.types import State

_STATE_FIELDS = (
    *("agent", "rollout_id", "parent_rollout", "parent_step", "subtask", "reward", "error"),
    *("has_step_rewards", "truncated", "truncation_reason", "bootstrap_value"),
    *("metrics", "timing"),
)
_EXTRAS = (
    *("turn", "num_prompt_tokens", "num_completion_tokens", "finish_reason"),
    *("truncated", "truncation_reason", "temperature", "sampling"),
)


def credit_state(state: State) -> State:
    """Return a state with the fields that `assign_credit` reads; a call's tokens become ranges."""
    # Own keys only: a column of the dataset row may have the name of a field that is not set.
    own = dict(state)
    light = State({name: own[name] for name in _STATE_FIELDS if name in own})
    light["trajectory"] = [_step(step) for step in state["trajectory"]]
    return light


def _step(step: Any) -> dict[str, Any]:
    extras, tokens = peek(step, "extras") or {}, peek(step, "tokens")
    sizes = None
    if isinstance(tokens, StepTokens):
        # Credit needs the length of a call (`max_seq_len`), never its tokens.
        prompt, sampled = tokens.tree.prompt_len(tokens.call), tokens.tree.num_sampled(tokens.call)
        sizes = {"prompt_ids": range(prompt), "completion_ids": range(sampled)}
    return {
        "reward": step["reward"],
        "advantage": None,
        "extras": {name: extras[name] for name in _EXTRAS if name in extras},
        "tokens": sizes,
    }
