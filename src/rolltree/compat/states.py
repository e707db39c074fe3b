"""States as verifiers 0.1.8 has them: also those that an environment makes by hand."""

from __future__ import annotations

import time
from typing import Any, cast

import rolltree.types
from rolltree.rollouts import current_episode
from rolltree.tokens import Trajectory, peek
from rolltree.types import RolloutTiming

AT_THE_END = ("completion", "advantage", "stop_condition")
"""Keys that a state gets when its rollout is over."""


class State(rolltree.types.State):
    """A state in which columns beside the input's fields are in `state["input"]` only."""

    reads_columns = False


def adopted(state: Any) -> rolltree.types.State:
    """Return a state, which an environment may have made by hand, as the engine needs it."""
    if not isinstance(state, rolltree.types.State):
        state = State(state)
    state["trajectory"] = Trajectory.of(state.get("trajectory"))
    for key, value in _MISSING.items():
        state.setdefault(key, value)
    if state.get("timing") is None:
        state["timing"] = RolloutTiming(
            generation_ms=0.0, scoring_ms=0.0, total_ms=0.0, start_time=time.time()
        )
    episode = current_episode()
    if episode is not None and not any(known is state for known in episode.states):
        episode.states.append(state)
    return cast(rolltree.types.State, state)


_MISSING: dict[str, Any] = {
    **dict.fromkeys(("reward", "metrics", "error", "truncation_reason")),
    **dict.fromkeys(("is_completed", "terminated", "truncated"), False),
}


def cut_tokens(tokens: Any, max_seq_len: int | None) -> None:
    """Cut the tokens of a step to `max_seq_len`, prompt and completion, and note what was cut."""
    num_prompt, num_sampled = (len(peek(tokens, key)) for key in ("prompt_ids", "completion_ids"))
    tokens["overlong_prompt"] = max_seq_len is not None and num_prompt > max_seq_len
    tokens["is_truncated"] = max_seq_len is not None and num_prompt + num_sampled > max_seq_len
    if max_seq_len is None or not tokens["is_truncated"]:
        return
    room = max(0, max_seq_len - num_prompt)
    for key in ("prompt_ids", "prompt_mask"):
        tokens[key] = tokens[key][:max_seq_len]
    for key in ("completion_ids", "completion_mask", "completion_logprobs"):
        tokens[key] = tokens[key][:room]
