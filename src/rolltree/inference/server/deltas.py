"""What is new in an answer that is still being sampled: text, reasoning, tool calls.

Nothing that was given out is ever taken back: text that may yet turn out to be half a character,
half a stop string, half a reasoning tag or a tool call is held back until that is settled. It knows
the renderer's parser. It knows nothing about events and HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.completion import REASONING_TAGS, cut_at_stop
from rolltree.inference.server.answers import outgoing_message
from rolltree.types import ChatMessage, FinishReason, SamplingParams, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.server.served import ServedModel

_MAY_BE_A_CALL = re.compile(r"[<\[{]")
_CONTROL = "<|"
"""Where a model's own markup may begin that its parser reads at the end (harmony's headers)."""
_TAGS = (_CONTROL, *(tag for tags in REASONING_TAGS.values() for tag in tags if tag))


def settled_text(renderer: ChatRenderer, ids: Sequence[int], sampling: SamplingParams) -> str:
    """Return the part of an unfinished answer's text that no later token can change."""
    if ids and ids[-1] in sampling.stop_token_ids:
        ids = ids[:-1]
    text = cut_at_stop(renderer.decode_answer(ids), sampling.stop).rstrip("\ufffd")
    return text[: len(text) - _unsettled(text, sampling.stop)]


class TextDeltas:
    """The new text of one choice, from one look to the next."""

    def __init__(self) -> None:
        self._given = ""

    def next(self, text: str) -> str:
        """Return what `text` has beyond what was given out before; nothing where they differ."""
        if not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        self._given = text
        return new


class MessageDeltas:
    """The new parts of one choice's message, as OpenAI's `delta` objects."""

    def __init__(self, served: ServedModel, tools: Sequence[ToolSchema] | None) -> None:
        self._served, self._tools = served, tools
        self._reasoning, self._content = TextDeltas(), TextDeltas()
        self._is_new = True

    def next(self, text: str) -> dict[str, Any]:
        """Return what an unfinished answer's settled text adds."""
        text = text[: len(text) - _unsettled(text, _TAGS)]
        parsed = self._served.renderer.parse_text(text, FinishReason.LENGTH, None)
        content = str(parsed.message["content"]).partition(_CONTROL)[0]
        if self._tools:
            content = _before_calls(content)
        if content.isspace():  # the space before a reasoning tag is no content
            content = ""
        return self._delta(str(parsed.message.get("reasoning_content", "")), content)

    def last(self, message: ChatMessage) -> dict[str, Any]:
        """Return what the finished message adds; tool calls come whole, each in one piece."""
        sent = outgoing_message(message)
        content = str(sent["content"] or "")
        delta = self._delta(str(sent.get("reasoning_content", "")), content)
        if sent.get("tool_calls"):
            calls = enumerate(sent["tool_calls"])
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return delta

    def _delta(self, reasoning: str, content: str) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        parts = {
            "reasoning_content": self._reasoning.next(reasoning),
            "content": self._content.next(content),
        }
        return delta | {name: part for name, part in parts.items() if part}


def _before_calls(content: str) -> str:
    """Return what stays content whatever follows: calls strip the space around it."""
    if content[:1].isspace():
        return ""
    call = _MAY_BE_A_CALL.search(content)
    return (content[: call.start()] if call else content).rstrip()


def _unsettled(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may be the start of one of `strings`.

    >>> _unsettled("12</th", ["</think>"])
    4
    """
    longest = max(map(len, strings), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return size
    return 0
