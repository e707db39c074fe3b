"""`Toolset`: tools by name, and how the calls of one message are read and answered.

Environments, agents and protocols share it. Tool calls as text are parsed in `rolltree.agents`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rolltree._helpers.untrusted import shorten
from rolltree.environments.tools.run import is_plain, run_all
from rolltree.environments.tools.tool import Tool, ToolArgumentError
from rolltree.inference.formats.reader import ToolCall
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.steps import ToolRequest, ToolScope
from rolltree.values.types import ChatMessage

R = TypeVar("R")


def raw_tool_calls(message: ChatMessage) -> list[ToolCall]:
    """Return the `tool_calls` of an assistant message; other messages have none."""
    if message.get("role") != "assistant":
        return []
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        # Some servers give the arguments as an object, contrary to OpenAI's API.
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {})
        calls.append(ToolCall(str(function.get("name") or ""), arguments, call.get("id")))
    return calls


def unreadable(problems: Sequence[str]) -> str:
    """Return what the model is told about calls that could not be read (`parse_problems`)."""
    return f"Your tool call could not be read: {'; '.join(problems)}"


class Toolset(dict[str, Tool]):
    """Tools by name; names are unique."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        super().__init__()
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool | Callable[..., Any], *, hidden: Sequence[str] = ()) -> Tool:
        """Add a tool, or a function that is described without its `hidden` arguments.

        Raises:
            ConfigError: there is a tool of that name, or the function cannot be described.
        """
        described = tool if isinstance(tool, Tool) else Tool.of(tool, hidden=hidden)
        if described.name in self:
            raise ConfigError(
                f"two tools are named {described.name!r}, so a call would be ambiguous. Rename one."
            )
        self[described.name] = described
        return described

    def remove(self, tool: Callable[..., Any] | str) -> Tool:
        """Remove a tool and return it.

        Raises:
            ConfigError: there is no such tool.
        """
        name = tool if isinstance(tool, str) else getattr(tool, "__name__", "")
        if name not in self:
            raise ConfigError(f"there is no tool {name!r}.{did_you_mean(name, self)}")
        return self.pop(name)

    def read(
        self, call: ToolCall, *, scope: ToolScope = "internal", others: Collection[str] = ()
    ) -> ToolRequest:
        """Return a call with checked arguments; one that cannot be made has a `problem`.

        `others` are further names for the hint about an unknown name.
        """
        tool, call_id = self.get(call.name), str(call.id or "")
        if tool is None:
            hint = did_you_mean(call.name, {*self, *others})
            problem = f"There is no tool named {shorten(call.name, 64)!r}.{hint}"
            return ToolRequest(call_id, call.name, None, "unknown", call.arguments, problem)
        try:
            arguments: Mapping[str, Any] = tool.read_arguments(call.arguments)
        except ToolArgumentError as error:
            return ToolRequest(call_id, call.name, None, scope, call.arguments, str(error))
        return ToolRequest(call_id, call.name, arguments, scope, call.arguments)

    async def answer_all(
        self, requests: Sequence[ToolRequest], answer: Callable[[ToolRequest], Awaitable[R]]
    ) -> list[R]:
        """Return `answer(request)` for each call of one message, in the calls' order.

        Calls of asynchronous tools run concurrently, those of synchronous ones one after another.
        """

        def in_order(request: ToolRequest) -> bool:
            return request.problem is None and is_plain(self[request.name])

        return await run_all(requests, in_order, answer)
