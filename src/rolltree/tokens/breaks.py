"""A break: a prompt that extends no earlier call, and so begins a new sample; its cause.

`break_causes.py` finds the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from rolltree.values.types import IntArray, text_of

Decoder = Callable[[list[int]], str]
Dialogue: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's shape; empty if they are not known."""


class BreakCause(StrEnum):
    """Why a prompt does not begin with the earlier path."""

    AGENT_HANDOFF = "agent_handoff"  # another agent's first call
    SAMPLED_AGAIN = "sampled_again"  # the same prompt; nothing is broken
    ANOTHER_CONVERSATION = "another_conversation"  # nothing of the earlier one; nothing is broken
    RETOKENIZED = "retokenized"  # same text, different ids
    SYSTEM_CHANGED = "system_or_tools_changed"  # the text before the first sampled token
    REASONING_STRIPPED = "reasoning_stripped"  # the template dropped earlier thinking
    COMPACTION = "compaction"  # history was summarized or dropped
    HISTORY_REWRITTEN = "history_rewritten"  # anything else, rollbacks included


UNBROKEN = frozenset({BreakCause.SAMPLED_AGAIN, BreakCause.ANOTHER_CONVERSATION})
"""Causes that begin a sample without a change of what an earlier call said."""


@dataclass(frozen=True, slots=True)
class Break:
    """One prompt that extends no earlier call.

    `call` and `previous` are call handles of a tree or, in a batch of samples, steps of rollout
    `rollout`. `previous` is None if the agent had no earlier call. `position` is the number of ids
    that match. `previous_ids` and `current_ids` are up to 16 ids on each side of it, in the earlier
    path and in the prompt; the texts are None without a decoder.
    """

    rollout: int
    call: int
    previous: int | None
    agent: str
    position: int
    cause: BreakCause
    previous_ids: IntArray
    current_ids: IntArray
    previous_text: str | None
    current_text: str | None

    @property
    def is_break(self) -> bool:
        """Whether a prefix was broken; else the prompt only began something new."""
        return self.cause not in UNBROKEN

    def of(self, rollout: int, call: int, previous: int, agent: str) -> Break:
        """Return this break with the indices of a rollout instead of those of a tree."""
        known = None if self.previous is None else previous
        return replace(self, rollout=rollout, call=call, previous=known, agent=agent)

    def __str__(self) -> str:
        was = self.previous_ids.tolist() if self.previous_text is None else self.previous_text
        now = self.current_ids.tolist() if self.current_text is None else self.current_text
        return (
            f"rollout {self.rollout} call {self.call}: {self.cause} at token {self.position}, "
            f"was {was!r}, is {now!r}"
        )


def system_text(messages: Dialogue) -> str:
    """Return the text of the system messages at the beginning of a conversation."""
    return system_and_rest(messages)[0]


def system_and_rest(messages: Dialogue) -> tuple[str, Dialogue]:
    """Return the system text of a conversation, and the messages after it."""
    size = 0
    while size < len(messages) and messages[size].get("role") in ("system", "developer"):
        size += 1
    return "\n".join(map(text_of, messages[:size])), messages[size:]
