"""Context strategies: which messages of its history an agent shows the model.

A strategy is configuration without state; the agent owns the history. It knows messages. It knows
nothing about tokens, so whether the exact prefix holds is a matter of what it shows: `FullDialog`
only ever appends, so each prompt continues the one before. The others say when they break it; a
break costs a new sample, never a sampled token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from rolltree.types import ChatMessage

Ask: TypeAlias = Callable[[Sequence[ChatMessage], str], Awaitable[str]]
"""`await ask(messages, kind)`: one more model call of the agent, recorded as an internal step."""


class ContextStrategy(Protocol):
    """Decides what of its history an agent shows the model."""

    def view(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages to send, without changing any."""
        ...

    async def prepare(
        self, history: Sequence[ChatMessage], num_tokens: int, ask: Ask
    ) -> Sequence[ChatMessage]:
        """Return the history to go on with, before a model call.

        `num_tokens` is what the last call's prompt and completion took, 0 before the first.
        """
        ...


class FullDialog:
    """Everything that was said, always: append-only, so the exact prefix holds."""

    def view(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the whole history."""
        return list(history)

    async def prepare(
        self, history: Sequence[ChatMessage], num_tokens: int, ask: Ask
    ) -> Sequence[ChatMessage]:
        """Return the history as it is."""
        return history
