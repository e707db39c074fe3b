"""`ToolEnv` and `StatefulToolEnv` of verifiers 0.1.8.

The calls of one message run one after the other, in the event loop, with whatever arguments the
model wrote. Errors of a tool are reported to the model by `error_formatter`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from rolltree import environments as rooms
from rolltree._helpers.tasks import contained
from rolltree.environments.tools import ToolUnavailable
from rolltree.values.types import ChatMessage, Messages, State, ToolSchema
from rolltree.verifiers.environments import MultiTurnEnv, stop
from rolltree.verifiers.helpers import maybe_await
from rolltree.verifiers.tools import convert_func_to_oai_tool

Function = Callable[..., Any]


class ToolEnv(MultiTurnEnv, rooms.ToolEnv):
    """Let the model call Python functions until it answers without a call."""

    # A property in rolltree's own class; here authors set it.
    tools: list[Function]
    tools = []
    tool_map: dict[str, Function]  # type: ignore[assignment]

    def __init__(
        self,
        tools: list[Function] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = lambda e: f"{e!s}",
        **kwargs: Any,
    ) -> None:
        # The author's own list, not a copy: verifiers appends to it, and a shared list grows.
        self.tools = tools or []
        self.error_formatter = error_formatter
        self.tool_map = {_name_of(tool): tool for tool in self.tools}
        schemas = [convert_func_to_oai_tool(tool) for tool in self.tools]
        MultiTurnEnv.__init__(self, oai_tools=schemas, max_turns=max_turns, **kwargs)

    def add_tool(self, tool: Function) -> None:
        """Offer one more tool."""
        self._offer(tool, convert_func_to_oai_tool(tool))

    def _offer(self, tool: Function, schema: ToolSchema) -> None:
        self.tools.append(tool)
        if self.oai_tools is None:
            self.oai_tools = []
        self.oai_tools.append(schema)
        self.tool_map[_name_of(tool)] = tool

    def remove_tool(self, tool: Function) -> None:
        """Stop offering a tool.

        Raises:
            ValueError: there is no such tool.
        """
        self.tools.remove(tool)
        name = _name_of(tool)
        schemas = self.oai_tools or []
        self.oai_tools = [schema for schema in schemas if schema["function"]["name"] != name]
        self.tool_map.pop(name)

    @stop
    async def no_tools_called(self, state: State) -> bool:
        """The model has answered without calling a tool."""
        if not state["trajectory"]:
            return False
        # verifiers only looks for the key, so an empty list of calls leads to one more turn.
        last = state["trajectory"][-1]["completion"][-1]
        return last["role"] == "assistant" and last.get("tool_calls") is None

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        """The model has made `max_turns` calls. If the last one is an answer, nothing was cut."""
        reached = bool(await super().max_turns_reached(state))
        # Both conditions are true then, and verifiers reports the alphabetically first; but a
        # finished rollout is not `truncated`. Only the one below is asked: an author's may count.
        asks_ours = getattr(self.no_tools_called, "__func__", None) is ToolEnv.no_tools_called
        if reached and asks_ours and await self.no_tools_called(state):
            state["terminated"] = True
        return reached

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any
    ) -> ChatMessage:
        """Call a tool and return its message; an exception becomes the message's text.

        Raises:
            ToolUnavailable: the tool could not be reached.
        """
        try:
            # In the event loop: tools of verifiers use objects that belong to its thread.
            with contained():
                text = str(await maybe_await(self.tool_map[tool_name], **tool_args))
        except ToolUnavailable:
            raise
        except Exception as error:  # told to the model
            self.logger.debug("tool %s raised", tool_name, exc_info=error)
            text = self.error_formatter(error)
        return {"role": "tool", "content": text, "tool_call_id": tool_call_id}

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Return one tool message per call of the last message, in the calls' order."""
        assert isinstance(messages, list), "a tool environment answers chats"
        answers: list[ChatMessage] = []
        # verifiers asserts that there are calls; a failed rollout has no reward, and a policy could
        # learn to avoid a reward that way.
        for call in messages[-1].get("tool_calls") or ():
            function = call.get("function", {})
            name, call_id = function.get("name", ""), call.get("id", "")
            try:
                args = json.loads(function.get("arguments", ""))
            except (TypeError, ValueError, RecursionError) as error:
                answers.append(await self._answer_spoiled(name, call_id, error))
                continue
            args = await self._completed_args(name, args, messages, state, **kwargs)
            answers.append(await self.call_tool(name, args, call_id))
        return answers

    async def _answer_spoiled(self, name: str, call_id: str, error: Exception) -> ChatMessage:
        """Return the answer to a call whose arguments are not JSON."""
        self.logger.error("Error parsing tool arguments: %s", error)
        # verifiers calls the tool without arguments, and the model reads Python's error message.
        return await self.call_tool(name, {}, call_id)

    async def _completed_args(
        self, name: str, args: Any, messages: Messages, state: State, **kwargs: Any
    ) -> Any:
        """Return the arguments that a tool is called with: here, the model's."""
        return args


class StatefulToolEnv(ToolEnv, rooms.StatefulToolEnv):
    """A `ToolEnv` whose `update_tool_args` completes the arguments of each call."""

    def __init__(
        self,
        tools: list[Function] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = lambda e: f"{e!s}",
        **kwargs: Any,
    ) -> None:
        self.skipped_args: dict[str, list[str]] = {}
        ToolEnv.__init__(self, tools, max_turns, error_formatter, **kwargs)

    def add_tool(self, tool: Function, args_to_skip: Sequence[str] = []) -> None:
        """Offer one more tool whose arguments `args_to_skip` the model does not see."""
        schema = convert_func_to_oai_tool(tool)
        parameters = schema["function"]["parameters"]
        for name in args_to_skip:
            parameters.get("properties", {}).pop(name, None)
            if name in parameters.get("required", ()):
                parameters["required"].remove(name)
        self._offer(tool, schema)
        self.skipped_args[_name_of(tool)] = list(args_to_skip)

    def remove_tool(self, tool: Function) -> None:
        """Stop offering a tool.

        Raises:
            ValueError: there is no such tool.
        """
        super().remove_tool(tool)
        self.skipped_args.pop(_name_of(tool), None)

    @abstractmethod
    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: Messages,
        state: State,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments to call the tool with; `tool_args` are the model's, unchecked."""

    async def _answer_spoiled(self, name: str, call_id: str, error: Exception) -> ChatMessage:
        # verifiers raises here, so a model could end rollouts without a reward by invalid JSON.
        return {"role": "tool", "content": self.error_formatter(error), "tool_call_id": call_id}

    async def _completed_args(
        self, name: str, args: Any, messages: Messages, state: State, **kwargs: Any
    ) -> Any:
        # verifiers calls it as a plain function; authors also write it as a coroutine.
        return await maybe_await(self.update_tool_args, name, args, messages, state, **kwargs)


def _name_of(tool: Function) -> str:
    return str(getattr(tool, "__name__", type(tool).__name__))
