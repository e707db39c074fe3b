"""Parses an answer's text into an assistant message: splits off reasoning, reads tool calls.

It never raises because of the text: what cannot be read stays in the content, and the message's
`parse_problems` says what was wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rolltree.inference.tool_calls import TOOL_PARSERS, call_messages, find_tool_parser
from rolltree.values.errors import UnknownName, did_you_mean
from rolltree.values.types import ChatMessage, FinishReason, ToolSchema

_HARMONY_MARKER = "<|channel|>"
"""A text that chat templates with OpenAI's harmony format contain."""
_MESSAGE = "<|message|>"
_MESSAGE_END = re.compile(r"<\|(?:end|return|call)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=\S")

REASONING_TAGS: dict[str, tuple[str, str]] = {
    "none": ("", ""),
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "harmony": ("", ""),  # channels instead of tags
}


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """An answer in two forms: as a message, and as the text that was sampled (no end token)."""

    message: ChatMessage
    text: str
    finish_reason: FinishReason


class CompletionParser:
    """Reads completions in one model's style.

    `source` is the chat template, in which "auto" finds the styles; `start` is a rendered prompt,
    which may open the reasoning at its end.

    Raises:
        UnknownName: there is no parser or reasoning style of that name.
    """

    def __init__(
        self,
        source: str = "",
        *,
        tool_parser: str = "auto",
        reasoning: str = "auto",
        start: str = "",
    ) -> None:
        self.tool_parser = find_tool_parser(source) if tool_parser == "auto" else tool_parser
        self.reasoning = _find_reasoning(source) if reasoning == "auto" else reasoning
        for what, name, table in (
            ("tool-call format", self.tool_parser, TOOL_PARSERS),
            ("reasoning format", self.reasoning, REASONING_TAGS),
        ):
            if name not in table:
                raise UnknownName(f"unknown {what} {name!r}." + did_you_mean(name, table))
        self._tags = REASONING_TAGS[self.reasoning]
        # Some templates open the reasoning in the prompt, so the answer has only its end.
        self._starts_inside = bool(self._tags[0]) and start.rstrip().endswith(self._tags[0])

    def parse(
        self,
        text: str,
        finish_reason: FinishReason,
        tools: Sequence[ToolSchema] | None = None,
    ) -> ParsedCompletion:
        """Return the message in `text`. Tool calls are read only if there are `tools`."""
        reasoning, content = self._split(text)
        message: ChatMessage = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if tools:
            found = TOOL_PARSERS[self.tool_parser](content)
            message["content"] = found.content
            if found.calls:
                message["tool_calls"] = call_messages(found.calls, text)
                # An answer that was cut at its limit is reported so, even if it has calls.
                if finish_reason == FinishReason.STOP:
                    finish_reason = FinishReason.TOOL_CALLS
            if found.problems:
                message["parse_problems"] = list(found.problems)
        return ParsedCompletion(message, text, finish_reason)

    def _split(self, text: str) -> tuple[str | None, str]:
        if self.reasoning == "harmony":
            return split_harmony(text)
        start, end = self._tags
        if not start:
            return None, text
        body = text.lstrip()
        if body.startswith(start):
            body = body[len(start) :]
        elif not self._starts_inside:
            return None, text
        # Without the end tag all of it is reasoning that was cut off.
        reasoning, _, content = body.partition(end)
        return reasoning.strip("\n"), content.lstrip("\n")


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it, or all of it if there is none.

    >>> cut_at_stop("12\\nQ:", ["Q:", "\\n"])
    '12'
    """
    found = [text.find(string) for string in stop]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _find_reasoning(source: str) -> str:
    if _HARMONY_MARKER in source:
        return "harmony"
    # By the end tag, since templates cut earlier reasoning off there.
    return next(
        (name for name, (_, end) in REASONING_TAGS.items() if end and end in source), "none"
    )


def split_harmony(text: str) -> tuple[str | None, str]:
    """Return reasoning and content of OpenAI's harmony format: analysis, and other channels.

    An answer of gpt-oss is several messages, each on a channel:

        <|channel|>analysis<|message|>thinking<|end|>
        <|start|>assistant<|channel|>commentary to=functions.add json<|message|>{...}<|call|>
        <|start|>assistant<|channel|>final<|message|>what the user reads<|return|>

    Messages to a tool stay as they were written, and so does text without a complete header.
    """
    reasoning: list[str] = []
    content: list[str] = []
    at = 0
    while (middle := text.find(_MESSAGE, at)) >= 0:
        header, begin = text[at:middle], middle + len(_MESSAGE)
        end = _MESSAGE_END.search(text, begin)
        stop, after = (end.start(), end.end()) if end else (len(text), len(text))
        channel = _CHANNEL.search(header)
        # The tool parser reads these, including the header.
        if _RECIPIENT.search(header):
            content.append(text[at:after])
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(text[begin:stop])
        else:
            content.append(text[begin:stop])
        at = after
    content.append(text[at:])
    return ("\n".join(reasoning) if reasoning else None), "".join(content)
