"""Context strategies, which choose the part of an agent's history that is sent to the model.

A strategy is configuration without state; the agent owns the history.

| strategy | breaks of the exact token prefix |
|---|---|
| `FullDialog` | none: it only appends |
| `TruncatedThinking` | one per turn whose previous turn had reasoning |
| `SlidingWindow` | one per turn after the window is full |
| `SummaryCompaction` | one per compaction |

A break begins a new sample but loses no sampled token: each call stays in the token tree as it was
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rolltree.environments.parsers import text_of
from rolltree.values.errors import ConfigError
from rolltree.values.types import ChatMessage

COMPACTION = "compaction"
"""`AgentStep.info["kind"]` of the call that wrote a summary."""


class Ask(Protocol):
    """One more model call of the agent, recorded as an internal step of its turn."""

    async def __call__(
        self, messages: Sequence[ChatMessage], kind: str, *, max_tokens: int | None = None
    ) -> str:
        """Return the text of the model's answer."""
        ...


class ContextStrategy(Protocol):
    """Decides which part of an agent's history is sent to the model; a subclass sends all of it."""

    __slots__ = ()

    def view(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages to send, without changing any."""
        return list(history)

    async def prepare(
        self, history: Sequence[ChatMessage], num_tokens: int, ask: Ask
    ) -> Sequence[ChatMessage]:
        """Return the history to continue with, before a model call.

        `num_tokens` is the size of the last call's prompt and completion; 0 before the first call.
        """
        return history


@dataclass(frozen=True, slots=True)
class FullDialog(ContextStrategy):
    """The whole dialog. It is append-only, so each prompt extends the previous call exactly."""


@dataclass(frozen=True, slots=True)
class TruncatedThinking(ContextStrategy):
    """The dialog without the reasoning before the last user message.

    Reasoning is `reasoning_content`, and the text before `close`.
    """

    close: str = "</think>"

    def view(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the history with earlier assistant messages stripped."""
        users = [n for n, message in enumerate(history) if message.get("role") == "user"]
        current = users[-1] if users else 0
        return [
            self._stripped(message) if index < current else message
            for index, message in enumerate(history)
        ]

    def _stripped(self, message: ChatMessage) -> ChatMessage:
        if message.get("role") != "assistant":
            return message
        text = text_of(message)
        _, found, answer = text.rpartition(self.close)
        if not found and "reasoning_content" not in message:
            return message
        kept = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**kept, "content": answer.lstrip("\n") if found else text}


@dataclass(frozen=True, slots=True)
class SlidingWindow(ContextStrategy):
    """The system prompt, by default the first user message, and the last turns.

    A turn is a user message and the messages that follow it, so that no answer of a tool loses its
    call.

    Args:
        num_turns: how many turns are shown, including the current one.
        keep_first: always show the first user message, which often states the task.

    Raises:
        ConfigError: `num_turns` is below 1.
    """

    num_turns: int
    keep_first: bool = True

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigError(
                f"num_turns is {self.num_turns}; the model would not see what it has to answer. "
                "Show at least 1 turn."
            )

    def view(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the head of the history and its last turns."""
        starts = [n for n, message in enumerate(history) if message.get("role") == "user"]
        if len(starts) <= self.num_turns:
            return list(history)
        head = list(history[: starts[0]])
        first, begin = history[starts[0]], starts[-self.num_turns]
        if not self.keep_first:
            return [*head, *history[begin:]]
        # A single message, because some chat templates reject two user messages in a row.
        text = f"{text_of(first)}\n\n[...]\n\n{text_of(history[begin])}"
        return [*head, {"role": "user", "content": text}, *history[begin + 1 :]]


SUMMARIZE = (
    "The conversation is getting long. Write down everything that is needed to go on: the task, "
    "what was done, what came of it, and what remains to do. Only this text will be kept."
)


@dataclass(frozen=True, slots=True)
class SummaryCompaction(ContextStrategy):
    """The dialog, until it is too long; then the model summarizes it and continues from there.

    The summary is a model call like any other: it continues the exact prefix, it is recorded as an
    internal step of kind "compaction", and it is trained.

    Args:
        max_tokens: summarize before a call if the last one had this many tokens or more.
        request: the message that asks for the summary.
        summary_tokens: the most tokens of the summary; None: the agent's own limit.

    Raises:
        ConfigError: `max_tokens` is below 1.
    """

    max_tokens: int
    request: str = SUMMARIZE
    summary_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, so every call would be summarized; use >= 1."
            )

    async def prepare(
        self, history: Sequence[ChatMessage], num_tokens: int, ask: Ask
    ) -> Sequence[ChatMessage]:
        """Return the system prompt and the summary in place of a long history.

        An unanswered user message follows the summary, in the same message.
        """
        if num_tokens < self.max_tokens:
            return history
        start = next((n for n, m in enumerate(history) if m.get("role") != "system"), 0)
        # An unanswered question must be kept word for word, so it is not summarized.
        is_waiting = history[-1].get("role") == "user"
        said = list(history[:-1] if is_waiting else history)
        said.append({"role": "user", "content": self.request})
        summary = await ask(said, COMPACTION, max_tokens=self.summary_tokens)
        text = f"What happened so far:\n{summary}"
        if is_waiting:
            text = f"{text}\n\n{text_of(history[-1])}"
        return [*history[:start], {"role": "user", "content": text}]
