"""The conversation of a rollout, for display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltree.values.types import State


def conversation_of(state: State) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the messages of the prompt and of the completion; a string is one message.

    For a rollout that failed before its completion was rendered, the messages of its last call
    are used.
    """
    prompt = message_list(state.get("prompt"), "user")
    found = message_list(state.completion, "assistant")
    if found or not state.get("trajectory"):
        return prompt, found
    last = state.trajectory[-1]
    seen = message_list(last["prompt"], "user")[len(prompt) :]
    return prompt, [*seen, *message_list(last["completion"], "assistant")]


def message_list(value: Any, role: str) -> list[Mapping[str, Any]]:
    """Return the messages of a prompt or a completion; a text is one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    # Scoring may have put anything in its place.
    given = value if isinstance(value, list | tuple) else ()
    return [item for item in given if isinstance(item, Mapping)]
