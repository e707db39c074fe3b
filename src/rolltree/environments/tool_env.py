"""`ToolEnv` and `StatefulToolEnv`: conversations in which the model calls Python functions.

The model's mistakes (a call that cannot be read, malformed JSON, an unknown tool, wrong arguments)
and the exceptions of tools are reported to the model and never fail the rollout.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from rolltree.environments.completion import conversation
from rolltree.environments.environment import maybe_await
from rolltree.environments.lifecycle import stop
from rolltree.environments.multiturn import MultiTurnEnv
from rolltree.environments.tools import (
    Tool,
    Toolset,
    answer_of,
    call_function,
    raw_tool_calls,
    unreadable,
)
from rolltree.inference.formats.reader import ToolCall
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.steps import ToolRequest
from rolltree.values.types import ChatMessage, Messages, State


class ToolEnv(MultiTurnEnv):
    """Let the model call tools until it answers without a call.

    Asynchronous tools of one message run concurrently. Synchronous ones run one after another in a
    thread; `@rt.run_inline` keeps a quick one in the event loop.
    The exceptions that tools raised are in `state["tool_errors"]`, with their tracebacks.

    Args:
        tools: functions with type hints and docstrings.
        max_turns: maximum number of model calls.
        error_formatter: turns an exception into the text that the model gets.
        tool_limit_s: time limit of one tool call; then it is stopped, and the model is told (see
            `rolltree.environments.tools.run`). None: no limit but the rollout's.
        settings: `MultiTurnEnv`'s.

    Raises:
        ConfigError: two tools have the same name, or a tool cannot be described.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        tool_limit_s: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **settings)
        if self.message_type != "chat":
            raise ConfigError(
                "a ToolEnv needs message_type='chat': a completion string has no tool calls."
            )
        self.error_formatter = error_formatter
        self.tool_limit_s = tool_limit_s
        self.tool_map = Toolset()
        for tool in tools or ():
            self.add_tool(tool)

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The tools' functions."""
        return [tool.func for tool in self.tool_map.values()]

    def add_tool(self, tool: Callable[..., Any] | Tool, *, hidden: Sequence[str] = ()) -> None:
        """Offer one more tool; rollouts that have begun do not see it.

        Raises:
            ConfigError: there is already a tool of that name.
        """
        self.oai_tools.append(self.tool_map.add(tool, hidden=hidden).schema)

    def remove_tool(self, tool: Callable[..., Any] | str) -> None:
        """Stop offering a tool.

        Raises:
            ConfigError: there is no such tool.
        """
        schema = self.tool_map.remove(tool).schema
        self.oai_tools = [known for known in self.oai_tools if known is not schema]

    @stop
    async def no_tools_called(self, state: State) -> bool:
        """The model has answered without calling a tool, or trying to."""
        steps = state.trajectory
        if not steps:
            return False
        said = steps[-1]["completion"]
        return not (_calls_of(said) or _problems_of(said))

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Return one tool message per call of the last message, in the calls' order.

        The last one also says which calls could not be read; without any, a user's message does.
        """
        requests = [self.tool_map.read(call) for call in _calls_of(messages)]
        answers = await self.tool_map.answer_all(requests, lambda r: self.answer_call(r, state))
        if not (problems := _problems_of(messages)):
            return answers
        said = unreadable(problems)
        # Many templates take no user's message after a tool's.
        if answers and isinstance(last := answers[-1].get("content"), str):
            return [*answers[:-1], {**answers[-1], "content": f"{last}\n\n{said}"}]
        return [*answers, {"role": "user", "content": said}]

    async def answer_call(self, request: ToolRequest, state: State) -> ChatMessage:
        """Complete the arguments of one call, make the call, and return its tool message.

        Raises:
            ToolUnavailable: the tool could not be reached, so the rollout fails.
        """
        if request.problem is not None:
            return _message(request.problem, request.call_id)
        tool, arguments = self.tool_map[request.name], dict(request.arguments or {})
        complete = await maybe_await(self.complete_arguments, tool, arguments, state)
        # `call_tool` has verifiers' signature, without the state; each asyncio task has its own
        # value of a context variable, so concurrent calls do not mix.
        before = _STATE.set(state)
        try:
            message: ChatMessage = await maybe_await(
                self.call_tool, request.name, complete, request.call_id
            )
        finally:
            _STATE.reset(before)
        return message

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **kwargs: Any
    ) -> ChatMessage:
        """Call a tool with its complete arguments and return its message. Override to wrap calls.

        An exception of the tool is recorded in the state of the current rollout.

        Raises:
            ToolUnavailable: the tool could not be reached, so the rollout fails.
        """
        state = _STATE.get()
        request = ToolRequest(tool_call_id, tool_name, tool_args, "internal")
        result = self.run_tool(self.tool_map[tool_name], tool_args, state)
        answer = await answer_of(request, result, self.error_formatter)
        if answer.error is not None:
            failure = {**answer.error.as_dict(), "tool": tool_name}
            state.setdefault("tool_errors", []).append(failure)
        return _message(answer.text, tool_call_id)

    def complete_arguments(
        self, tool: Tool, arguments: dict[str, Any], state: State
    ) -> dict[str, Any]:
        """Return the arguments to call with; an override may be asynchronous.

        This is the environment's code, so an exception in it fails the rollout.
        """
        return arguments

    async def run_tool(self, tool: Tool, arguments: dict[str, Any], state: State) -> Any:
        """Call the tool's function and return what it returns."""
        return await call_function(tool, arguments, limit_s=self.tool_limit_s)


_STATE: ContextVar[State] = ContextVar("rolltree_tool_state", default=State())  # noqa: B039


def _calls_of(messages: Messages) -> list[ToolCall]:
    """Return the tool calls of the last message, if the model wrote it."""
    return [] if isinstance(messages, str) or not messages else raw_tool_calls(messages[-1])


def _problems_of(messages: Messages) -> Sequence[str]:
    """Return why calls in the last message could not be read, if the model wrote it."""
    last = messages[-1] if messages and not isinstance(messages, str) else {}
    return last.get("parse_problems") or () if last.get("role") == "assistant" else ()


def _message(text: str, call_id: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


class StatefulToolEnv(ToolEnv):
    """A `ToolEnv` whose `update_tool_args` completes the arguments of each call from the state.

    Example:
        >>> class Notes(StatefulToolEnv):
        ...     def __init__(self, **settings):
        ...         super().__init__(**settings)
        ...         self.add_tool(write, args_to_skip=["notes"])
        ...
        ...     def update_tool_args(self, tool_name, tool_args, messages, state):
        ...         return {**tool_args, "notes": state.setdefault("notes", [])}
    """

    def add_tool(
        self,
        tool: Callable[..., Any],
        args_to_skip: Sequence[str] = (),
        *,
        hidden: Sequence[str] = (),
    ) -> None:
        """Offer one more tool whose arguments `args_to_skip` the model does not see.

        Raises:
            ConfigError: there is already a tool of that name, or the tool has no such argument.
        """
        skipped = (*args_to_skip, *hidden)
        known = inspect.signature(tool).parameters
        unknown = [name for name in skipped if name not in known]
        if unknown:
            raise ConfigError(
                f"tool {getattr(tool, '__name__', tool)!r} has no argument {unknown[0]!r} to skip."
                f"{did_you_mean(unknown[0], known)}"
            )
        super().add_tool(tool, hidden=skipped)

    @abstractmethod
    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> Any:
        """Return the arguments to call the tool with; it may be asynchronous.

        `tool_args` are the model's checked arguments, `messages` the conversation up to the call.
        """

    async def complete_arguments(  # type: ignore[override]
        self, tool: Tool, arguments: dict[str, Any], state: State
    ) -> dict[str, Any]:
        """Return the arguments that `update_tool_args` returns.

        Raises:
            ConfigError: it did not return a dict, or a required argument is still missing.
        """
        # The conversation up to the call, as verifiers passes it to `update_tool_args`.
        messages = conversation(state.trajectory)
        updated = await maybe_await(self.update_tool_args, tool.name, arguments, messages, state)
        if not isinstance(updated, dict):
            raise ConfigError(
                f"update_tool_args returned a {type(updated).__name__} for {tool.name!r}, so the "
                "tool has no arguments. Return a dict of arguments."
            )
        missing = [
            parameter.name
            for parameter in inspect.signature(tool.func).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_KEYWORD
            and parameter.name not in updated
        ]
        if missing:
            raise ConfigError(
                f"argument {missing[0]!r} of tool {tool.name!r} is hidden from the model, and "
                "update_tool_args did not fill it in. Return it from there."
            )
        return updated
