"""OpenAI's harmony format, which gpt-oss writes: several messages, each with a header.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>what the user reads<|return|>

Analysis is reasoning, a message to a tool is a call, and the rest is content. A call that cannot be
read, and text without a complete header, stay as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rolltree._helpers.untrusted import read_json
from rolltree.inference.formats.calls import (
    MAX_PROBLEMS,
    Source,
    calls_in_text,
    made_call,
)
from rolltree.inference.formats.machine import Reading
from rolltree.inference.formats.reader import CompletionParser, ToolCall, ToolCalls, unsettled
from rolltree.values.types import ChatMessage, ToolSchema

_MESSAGE, _START, _CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_LEADING_TO = re.compile(r"\s*to=")


class Messages:
    """The messages of an answer, read as it grows.

    Args:
        with_calls: whether messages to tools are calls; otherwise they are content.
    """

    def __init__(self, with_calls: bool) -> None:
        self._with_calls = with_calls
        self._at = 0
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.open: tuple[str, int] | None = None
        """The kind of the unfinished message, and where its body begins."""

    def read(self, source: Source, *, final: bool) -> None:
        """Read the messages that are complete by now, or all."""
        text = source.text
        self.open = None
        while (middle := source.find(_MESSAGE, self._at)) >= 0:
            begin = middle + len(_MESSAGE)
            stop, mark = source.first(_ENDS, begin)
            start = self._header_start(source, middle)
            header = text[self._at if start is None else start : middle]
            to = _RECIPIENT.search(header) if start is not None else None
            channel = _CHANNEL_NAME.search(header)
            kind = "content"
            if to is not None or (start is not None and "to=" in header):
                kind = "call"
            elif channel is not None and channel[1] == "analysis":
                kind = "reasoning"
            if stop < 0:
                if not final:
                    self.open = (kind, begin)
                    return
                stop, mark = len(text), ""
            if start is not None:
                self.content.append(text[self._at : start])
            end = stop + len(mark)
            if kind == "call":
                self._call(to, text[begin:stop], text[start:end])
            else:
                (self.reasoning if kind == "reasoning" else self.content).append(text[begin:stop])
            self._at = end
        if final:
            self.content.append(text[self._at :])
            self._at = len(text)

    def _call(self, to: re.Match[str] | None, body: str, written: str) -> None:
        if not self._with_calls:
            self.content.append(written)
            return
        try:
            if to is None:
                raise ValueError("a call names its tool as to=functions.NAME")
            self.calls.append(made_call(to[1], read_json(body)))
        except ValueError as error:
            index = len(self.calls) + len(self.problems)
            self.problems.append(f"tool call {index}: {error}")
            self.content.append(written)

    def _header_start(self, source: Source, high: int) -> int | None:
        """Return the start of the header that ends at `high`; None if there is none."""
        text, low = source.text, self._at
        last = text.rfind(_START, low, high)
        if last < 0 and low == 0 and _LEADING_TO.match(text):  # the prompt has the header's start
            return 0
        if last >= 0 and text.startswith("assistant", last + len(_START)):
            return last
        channel = text.find(_CHANNEL, max(low, last), high)
        return channel if channel >= 0 else None

    def settled(self, text: str) -> tuple[list[str], str]:
        """Return the reasoning and the content so far, with those of the unfinished message."""
        limit = len(text) - unsettled(text, _ENDS)
        reasoning, content = list(self.reasoning), "".join(self.content)
        if self.open is not None:
            kind, begin = self.open
            if kind == "reasoning":
                reasoning.append(text[begin:limit])
            elif kind == "content":
                content += text[begin:limit]
        return reasoning, content

    def result(self) -> ToolCalls:
        """Return content, calls and problems."""
        content, problems = "".join(self.content), self.problems
        if len(problems) > MAX_PROBLEMS:
            more = len(problems) - MAX_PROBLEMS
            problems = [*problems[:MAX_PROBLEMS], f"{more} more calls cannot be read"]
        content = content.strip() if self.calls else content
        return ToolCalls(content, tuple(self.calls), tuple(problems))


class HarmonyReading(Reading):
    """An answer in messages that is read while it grows."""

    def __init__(
        self,
        parser: CompletionParser,
        tools: Sequence[ToolSchema] | None,
        places: set[int] | frozenset[int] | None,
    ) -> None:
        super().__init__(parser, tools, places)
        self._messages = Messages(bool(tools) and self._row.grammar == "harmony")

    def advance(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that no later text can change."""
        self._messages.read(self._source(text), final=False)
        reasoning, content = self._messages.settled(text)
        if self._tools:  # the space around content goes if there are calls
            content = "" if content[:1].isspace() else content.rstrip()
        return "\n".join(reasoning).strip("\n"), content

    def finish(self, text: str) -> ChatMessage:
        """Return the message of the whole answer."""
        self._messages.read(self._source(text), final=True)
        found = self._messages.result()
        if self._tools and self._row.grammar != "harmony":
            found = calls_in_text(self._row, found.content, self._tools)
        reasoning = self._messages.reasoning
        return self._message(text, found.content, reasoning, found.calls, found.problems)
