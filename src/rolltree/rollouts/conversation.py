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
    prompt = _messages(state.get("prompt"), "user")
    found = _messages(state.completion, "assistant")
    if found or not state.get("trajectory"):
        return prompt, found
    last = state.trajectory[-1]
    seen = _messages(last["prompt"], "user")[len(prompt) :]
    return prompt, [*seen, *_messages(last["completion"], "assistant")]


def _messages(value: Any, role: str) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [item for item in value or () if isinstance(item, Mapping)]
