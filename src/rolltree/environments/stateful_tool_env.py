"""`StatefulToolEnv`: tools with arguments that the model does not see.

It knows hidden arguments (a session, a sandbox, a file system) and asks the environment for them
before each call. It leaves out where they come from.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from rolltree.environments.completion import conversation
from rolltree.environments.environment import settle
from rolltree.environments.tool_env import ToolEnv
from rolltree.errors import ConfigError, did_you_mean
from rolltree.tools import Tool
from rolltree.types import Messages, State


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
            ConfigError: there is a tool of that name, or it has no such argument.
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

        `tool_args` are the model's, checked; `messages` the conversation up to the call.
        """

    async def complete_arguments(  # type: ignore[override]
        self, tool: Tool, arguments: dict[str, Any], state: State
    ) -> dict[str, Any]:
        """Ask `update_tool_args`.

        Raises:
            ConfigError: it returned no dict, or an argument without a default is still missing.
        """
        messages = conversation(state["trajectory"])
        updated = await settle(self.update_tool_args(tool.name, arguments, messages, state))
        if not isinstance(updated, dict):
            raise ConfigError(
                f"update_tool_args returned a {type(updated).__name__} for {tool.name!r}; the tool "
                "has nothing to be called with. Return a dict of arguments."
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
