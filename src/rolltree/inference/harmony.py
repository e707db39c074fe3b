"""OpenAI's harmony format, as gpt-oss writes it: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>what the user reads<|return|>

It splits off reasoning; the calls are read by `tool_calls.parse_harmony`. It knows text only.
"""

from __future__ import annotations

import re

MARKER = "<|channel|>"
"""What a chat template that writes this format mentions."""

_MESSAGE = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=\S")


def split_harmony(text: str) -> tuple[str | None, str]:
    """Return reasoning and content: the analysis, and what is on the other channels.

    Messages to a tool stay as they were written, and so does what has no complete header.
    """
    reasoning: list[str] = []
    content: list[str] = []
    at = 0
    for match in _MESSAGE.finditer(text):
        at = match.end()
        channel = _CHANNEL.search(match[1])
        if _RECIPIENT.search(match[1]):
            content.append(match[0])
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(match[2])
        else:
            content.append(match[2])
    content.append(text[at:])
    return ("\n".join(reasoning) if reasoning else None), "".join(content)
