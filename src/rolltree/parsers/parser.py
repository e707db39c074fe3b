"""`Parser`: from a completion to an answer, by a function on text.

It knows chat messages and strings. It knows nothing about rewards beyond the format check that a
parser can do on its own, and nothing about environments. It leaves out tagged text (`xml`) and
reasoning (`think`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rolltree.types import ChatMessage, Messages

FormatReward = Callable[..., float]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of one chat message; of a list of content parts, their texts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(
            part if isinstance(part, str) else str(part.get("text") or "")
            for part in content
            if isinstance(part, str | Mapping)
        )
    return ""


def identity(text: str) -> Any:
    """Return the text as it is: the default `extract_fn`."""
    return text


class Parser:
    """Turn text into a value with `extract_fn`, and pick the answer out of a completion.

    Subclasses override `parse`; `parse_answer` and the format reward build on it.
    """

    def __init__(self, extract_fn: Callable[[str], Any] = identity) -> None:
        self.extract_fn = extract_fn

    @property
    def logger(self) -> logging.Logger:
        """The logger of this class of parsers."""
        return logging.getLogger("rolltree.parsers").getChild(type(self).__name__)

    def parse(self, text: str) -> Any:
        """Return what `extract_fn` makes of `text`."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer in the last assistant message, or None when there is none."""
        if isinstance(completion, str):
            return self.parse(completion)
        spoken = self.get_assistant_messages(completion)
        return self.parse(text_of(spoken[-1])) if spoken else None

    def get_assistant_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages that the model wrote."""
        return _by_role(completion, "assistant")

    def get_user_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages of the user or the environment."""
        return _by_role(completion, "user")

    def get_system_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the system messages."""
        return _by_role(completion, "system")

    def get_tool_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the results of tool calls."""
        return _by_role(completion, "tool")

    def score_format(self, text: str) -> float:
        """Return how well one answer keeps the format, in [0, 1]. A plain parser has none: 1."""
        return 1.0

    def get_format_reward_func(self) -> FormatReward:
        """Return a reward function: the mean format score over the assistant messages.

        A completion without an assistant message scores 0.
        """

        def format_reward(completion: Messages, **_: Any) -> float:
            if isinstance(completion, str):
                texts = [completion]
            else:
                texts = [text_of(message) for message in self.get_assistant_messages(completion)]
            return sum(map(self.score_format, texts)) / len(texts) if texts else 0.0

        return format_reward


def _by_role(completion: list[ChatMessage], role: str) -> list[ChatMessage]:
    return [message for message in completion if message.get("role") == role]
