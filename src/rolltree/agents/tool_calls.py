"""Tool call formats: native calls in the chat template, or calls as text (ReAct).

A format describes the tools to the model, reads calls from a message, and writes answers as
messages. The text form is that of ReAct (Yao et al., 2022, arXiv:2210.03629): Thought, Action,
Action Input, Observation, Final Answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Protocol

from rolltree._helpers.untrusted import read_json_start
from rolltree.environments.parsers import text_of
from rolltree.environments.tools import raw_tool_calls
from rolltree.inference.formats.reader import ToolCall, ToolCalls
from rolltree.values.steps import ToolAnswer
from rolltree.values.types import ChatMessage, ToolSchema


class ToolCallFormat(Protocol):
    """A way to write tool calls."""

    stop: tuple[str, ...]
    """Stop strings that this format needs."""
    needs_answers: bool
    """Whether servers and templates reject a history in which a call has no answer."""

    def schemas(self, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
        """Return the schemas that are sent with each model call."""
        ...

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Return the part of the system prompt about the tools, or ""."""
        ...

    def read(self, message: ChatMessage) -> ToolCalls:
        """Return the calls in an assistant message."""
        ...

    def write(self, answers: Sequence[ToolAnswer]) -> list[ChatMessage]:
        """Return the messages with the answers, in order."""
        ...

    def complain(self, problem: str) -> list[ChatMessage]:
        """Return the messages that say that no call could be read."""
        ...

    def final(self, message: ChatMessage) -> str:
        """Return the text of a final answer, for the agent's parser."""
        ...


class NativeCalls:
    """Calls in the form of the chat template: schemas, `tool_calls`, and tool messages."""

    stop: tuple[str, ...] = ()
    needs_answers = True

    def schemas(self, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
        """Return all schemas."""
        return list(tools)

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Return nothing, since the template describes the tools."""
        return ""

    def read(self, message: ChatMessage) -> ToolCalls:
        """Read `tool_calls` and `parse_problems`."""
        problems = tuple(message.get("parse_problems") or ())
        return ToolCalls(text_of(message), tuple(raw_tool_calls(message)), problems)

    def write(self, answers: Sequence[ToolAnswer]) -> list[ChatMessage]:
        """Return one tool message per answer."""
        return [
            {"role": "tool", "tool_call_id": answer.call_id, "content": answer.text}
            for answer in answers
        ]

    def complain(self, problem: str) -> list[ChatMessage]:
        """Return a user message, since there is no call that a tool message could answer."""
        return [{"role": "user", "content": problem}]

    def final(self, message: ChatMessage) -> str:
        """Return the text of the message."""
        return text_of(message)


_FINAL = "Final Answer:"
_ACTION = re.compile(r"^[ \t]*Action:(.*)$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*Action Input:[ \t]*", re.MULTILINE)
_REACT = """\
You can use these tools:
{tools}

Work in steps. To use a tool, write:
Thought: what you think
Action: the name of one tool
Action Input: its arguments, as one JSON object

You are then told the observation. When you know what to answer, write:
Thought: what you think
Final Answer: your answer"""


class ReActCalls:
    """Calls as lines of text, for models whose chat template has no tools."""

    stop: tuple[str, ...] = ("\nObservation:",)
    needs_answers = False

    def schemas(self, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
        """Return nothing, since the system prompt describes the tools."""
        return []

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Return the format to follow, and a line per tool."""
        if not tools:
            return ""
        lines = []
        for tool in tools:
            function = tool["function"]
            properties = (function.get("parameters") or {}).get("properties") or {}
            about = " ".join(str(function.get("description") or "").split())
            lines.append(f"- {function['name']}({json.dumps(properties)}): {about}")
        return _REACT.format(tools="\n".join(lines))

    def read(self, message: ChatMessage) -> ToolCalls:
        """Read the first action, unless a final answer comes before it."""
        text = text_of(message)
        action = _ACTION.search(text)
        final = text.find(_FINAL)
        # A model may invent a further round after its final answer.
        if action is None or 0 <= final < action.start():
            return ToolCalls(text)
        given = _INPUT.search(text, action.end())
        if given is None:
            problem = "an Action needs a line 'Action Input:' with a JSON object"
            return ToolCalls(text, problems=(problem,))
        body = text[given.end() :].strip()
        try:
            # Text after the arguments is an observation that the model invented.
            _, end = read_json_start(body)
        except ValueError:
            # The error is reported when the arguments are read.
            end = len(body)
        return ToolCalls(text, (ToolCall(action[1].strip(" \t"), body[:end]),))

    def write(self, answers: Sequence[ToolAnswer]) -> list[ChatMessage]:
        """Return one user message with the observations."""
        text = "\n".join(f"Observation: {answer.text}" for answer in answers)
        return [{"role": "user", "content": text}]

    def complain(self, problem: str) -> list[ChatMessage]:
        """Return the problem as an observation."""
        return [{"role": "user", "content": f"Observation: {problem}"}]

    def final(self, message: ChatMessage) -> str:
        """Return the text after "Final Answer:", or the whole text."""
        text = text_of(message)
        _, found, answer = text.partition(_FINAL)
        return answer.strip() if found else text
