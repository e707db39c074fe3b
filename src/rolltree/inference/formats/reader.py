"""Reads an answer as an assistant message: its reasoning, its content, and its tool calls.

It never raises because of a text: what cannot be read stays in the content, and `parse_problems`
says what was wrong. The state machine (`machine.py`) is loaded for an answer that has marks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rolltree.inference.formats.rows import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from rolltree.values.types import ChatMessage, FinishReason, IntArray, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.formats.machine import Reading


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is a JSON object as text, as in OpenAI's messages.

    `id` is the one that the model wrote, if its format has ids; otherwise None.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """A parsed completion: its text, its calls, and what could not be parsed."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """An answer in two forms: as a message, and as the text that was sampled (no end token)."""

    message: ChatMessage
    text: str
    finish_reason: FinishReason


class CompletionParser:
    """Reads completions in one model's formats.

    Args:
        source: the chat template, in which "auto" finds the formats.
        tool_parser: the format of tool calls: a row, the name of one, or "auto".
        reasoning: the format of reasoning, likewise.
        start: a rendered prompt, which may open the reasoning at its end.
        ids_of: from marks to the ids of those that are single tokens.
        respond: reads a text as the tokenizer's own `response_template` says, which comes first
            where the formats are "auto".

    Raises:
        UnknownName: there is no format of that name.
    """

    def __init__(
        self,
        source: str = "",
        *,
        tool_parser: str | ToolFormat = "auto",
        reasoning: str | ReasoningFormat = "auto",
        start: str = "",
        ids_of: Callable[[Sequence[str]], Mapping[int, str]] | None = None,
        respond: Callable[..., dict[str, object]] | None = None,
    ) -> None:
        self.tools = tool_format(tool_parser, source)
        self.thoughts = reasoning_format(reasoning, source)
        self.respond = respond if tool_parser == reasoning == "auto" else None
        self.reads_calls = tool_parser != "auto" or self.tools.grammar != "" or bool(self.respond)
        """Whether the format of calls is known, or was chosen to be none."""
        self.start = start
        # Some templates open the reasoning in the prompt, so the answer has only its end.
        mark = self.thoughts.start
        self.starts_inside = bool(mark) and start.rstrip().removesuffix(
            self.thoughts.lead.strip()
        ).rstrip().endswith(mark)
        self._ids_of = ids_of

    def after_reasoning(self) -> CompletionParser:
        """Return the parser of answers whose prompt has their reasoning, if any, and more."""
        parser = copy.copy(self)
        parser.starts_inside = False
        return parser

    @property
    def tool_parser(self) -> str:
        """The name of the format of tool calls."""
        return self.tools.name

    @property
    def reasoning(self) -> str:
        """The name of the format of reasoning."""
        return self.thoughts.name

    @cached_property
    def tokens(self) -> Mapping[int, str]:
        """The marks that are single tokens, by their ids."""
        marks = dict.fromkeys((*self.tools.marks, *self.thoughts.marks))
        return self._ids_of(tuple(marks)) if self._ids_of is not None and marks else {}

    def places(
        self, text: str, ids: Sequence[int] | IntArray, decode: Callable[[list[int]], str]
    ) -> frozenset[int] | None:
        """Return where the mark tokens of an answer begin in its text; None if that is not known.

        `text` is what the ids spell, or a beginning of it.
        """
        if not self.tokens:
            return None
        listed = [int(token) for token in ids]
        # The usual plain answer has none: whatever it spells is text.
        if self.tokens.keys().isdisjoint(listed):
            return frozenset()
        from rolltree.inference.formats.calls import mark_places

        return mark_places(text, listed, self.tokens, decode)

    def _is_plain(self, text: str, tools: Sequence[ToolSchema] | None) -> bool:
        """Whether the text has no mark at all, as most answers: it is the content."""
        row = self.tools if tools else None
        if self.starts_inside or self.thoughts.wraps or self.respond or (row and row.bare):
            return False
        marks = (*self.thoughts.marks, "<|message|>", *((*row.opens, *row.wraps) if row else ()))
        return not any(mark in text for mark in marks)

    def reading(
        self,
        tools: Sequence[ToolSchema] | None,
        places: set[int] | frozenset[int] | None = None,
    ) -> Reading:
        """Return the state of an answer that has just begun; calls are read if there are tools."""
        if self.respond is not None:
            from rolltree.inference.formats.response import ResponseReading

            return ResponseReading(self, tools, places)
        if self.thoughts.name == "harmony" or (tools and self.tools.grammar == "harmony"):
            from rolltree.inference.formats.harmony import HarmonyReading

            return HarmonyReading(self, tools, places)
        from rolltree.inference.formats.machine import Reading

        return Reading(self, tools, places)

    def parse(
        self,
        text: str,
        finish_reason: FinishReason,
        tools: Sequence[ToolSchema] | None = None,
        places: frozenset[int] | None = None,
    ) -> ParsedCompletion:
        """Return the message in `text`. Tool calls are read only if there are `tools`."""
        if self._is_plain(text, tools):
            return ParsedCompletion({"role": "assistant", "content": text}, text, finish_reason)
        message = self.reading(tools, places).finish(text)
        # An answer that was cut at its limit is reported so, even if it has calls.
        if "tool_calls" in message and finish_reason == FinishReason.STOP:
            finish_reason = FinishReason.TOOL_CALLS
        return ParsedCompletion(message, text, finish_reason)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it, or all of it if there is none.

    >>> cut_at_stop("12\\nQ:", ["Q:", "\\n"])
    '12'
    """
    found = [text.find(string) for string in stop]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def unsettled(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may be the start of one of `strings`.

    >>> unsettled("12</th", ["</think>"])
    4
    """
    longest = max(map(len, strings), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return size
    return 0
