"""`Parser` and `ThinkParser`: find the answer in a completion."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rolltree.values.types import ChatMessage, Messages, text_of

FormatReward = Callable[..., float]


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
        return logging.getLogger("rolltree.environments.parsers").getChild(type(self).__name__)

    def parse(self, text: str) -> Any:
        """Return `extract_fn(text)`."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer in the last assistant message, or None when there is none."""
        if isinstance(completion, str):
            return self.parse(completion)
        spoken = self.get_assistant_messages(completion)
        return self.parse(text_of(spoken[-1])) if spoken else None

    def get_assistant_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages that the model wrote."""
        return self._by_role(completion, "assistant")

    def get_user_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages of the user or the environment."""
        return self._by_role(completion, "user")

    def get_system_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the system messages."""
        return self._by_role(completion, "system")

    def get_tool_messages(self, completion: list[ChatMessage]) -> list[ChatMessage]:
        """Return the results of tool calls."""
        return self._by_role(completion, "tool")

    def _by_role(self, completion: list[ChatMessage], role: str) -> list[ChatMessage]:
        return [message for message in completion if message.get("role") == role]

    def score_format(self, text: str) -> float:
        """Return how well one answer keeps the format, in [0, 1]; 1 without a format."""
        return 1.0

    def get_format_reward_func(self) -> FormatReward:
        """Return a reward function: the mean format score over the assistant messages.

        A completion without an assistant message scores 0.
        """

        def format_reward(completion: Messages, **_: Any) -> float:
            if isinstance(completion, str):
                texts = [completion]
            else:
                # Every turn has to keep the format, so the mean is over all of them.
                texts = [text_of(message) for message in self.get_assistant_messages(completion)]
            return sum(map(self.score_format, texts)) / len(texts) if texts else 0.0

        return format_reward


OPEN, CLOSE = "<think>", "</think>"
_BRACES = re.compile(r"[{}]")


class ThinkParser(Parser):
    """The answer is what follows the last `</think>`; without one there is no answer (`""`)."""

    def parse(self, text: str) -> Any:
        """Return `extract_fn` of the text after the reasoning."""
        # The last tag: a model may quote "</think>" while it thinks.
        _, found, answer = text.rpartition(CLOSE)
        return self.extract_fn(answer.strip() if found else "")

    def score_format(self, text: str) -> float:
        """Return 1 for one opening tag at the start, one closing tag and text after it, or 0."""
        body = text.strip()
        kept = (
            body.startswith(OPEN)
            and body.count(OPEN) == 1
            and body.count(CLOSE) == 1
            and not body.endswith(CLOSE)
        )
        return float(kept)


class MaybeThinkParser(ThinkParser):
    """Like `ThinkParser`, but a text without reasoning is the answer as a whole."""

    def parse(self, text: str) -> Any:
        """Return `extract_fn` of the text after the reasoning, or of the whole text."""
        return super().parse(text) if CLOSE in text else self.extract_fn(text.strip())

    def score_format(self, text: str) -> float:
        """Return 1 for a text without any tag; otherwise as `ThinkParser`."""
        return 1.0 if OPEN not in text and CLOSE not in text else super().score_format(text)


def extract_boxed_answer(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`, braces balanced; else the text itself.

    >>> extract_boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    begin = start + len("\\boxed{")
    depth = 1
    # A scan in linear time: a model may write a million braces.
    for brace in _BRACES.finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()]
    return text


def extract_hash_answer(text: str) -> str | None:
    """Return what follows the last `####`, stripped; None without one (GSM8K's convention).

    >>> extract_hash_answer("12 / 4 = 3\\n#### 3")
    '3'
    """
    _, found, answer = text.rpartition("####")
    return answer.strip() if found else None
