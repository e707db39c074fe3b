"""`MCPEnv`: tools of MCP servers in a `ToolEnv`.

It knows servers, their tools' schemas and which connection a rollout uses. It knows nothing about
the protocol (`mcp_servers`). It leaves out tools that change while an environment lives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolltree.environments.decorators import cleanup, teardown
from rolltree.environments.mcp_servers import MCPConnection, MCPServer, MCPTool
from rolltree.environments.tool_env import ToolEnv
from rolltree.errors import ConfigError
from rolltree.rubrics.functions import in_thread
from rolltree.tools import Tool
from rolltree.types import State

_SESSION = "mcp_session"


class MCPToolError(Exception):
    """An MCP tool answered with an error; its text is what the model is told."""


class MCPEnv(ToolEnv):
    """Offer the tools of MCP servers, beside plain functions.

    Servers are reached when the environment is made, so that their tools are known, and closed by
    its teardown. A server that cannot be reached during a rollout fails it; an error that a tool
    returns is an answer to the model.

    Args:
        mcp_servers: `MCPServer`s, or mappings of their fields.
        isolated: every rollout has connections of its own, so a server started by command is a
            process per rollout and its state is not shared between episodes.
        tools: further tools, plain functions.
        settings: `ToolEnv`'s.

    Raises:
        ConfigError: the `mcp` package is missing, or two tools have one name.
        ToolUnavailable: a server cannot be reached.
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServer | Mapping[str, Any]],
        *,
        isolated: bool = False,
        tools: Sequence[Callable[..., Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.mcp_servers = [MCPServer.of(server) for server in mcp_servers]
        names = [server.name for server in self.mcp_servers]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"an MCPEnv needs servers with distinct names, and got {names}.")
        self.isolated = isolated
        self._numbers = itertools.count()
        self._sessions: dict[int, dict[str, MCPConnection]] = {}
        self._shared: dict[str, MCPConnection] = {}
        super().__init__(tools=tools, **settings)
        self._shared = self._connect()
        try:
            for connection in self._shared.values():
                for described in connection.tools():
                    self._offer(described)
        except BaseException:
            _close(self._shared)
            raise
        if isolated:
            _close(self._shared)

    async def setup_state(self, state: State) -> State:
        """Open the rollout's own connections when it has some."""
        if self.isolated:
            number = next(self._numbers)
            self._sessions[number] = await in_thread(self._connect)
            state[_SESSION] = number
        return state

    async def run_tool(self, tool: Tool, arguments: dict[str, Any], state: State) -> Any:
        """Ask the server whose tool it is, or call the function."""
        if not isinstance(tool.func, _Remote):
            return await super().run_tool(tool, arguments, state)
        own = self._sessions[state[_SESSION]] if self.isolated else self._shared
        described = tool.func.tool
        text, is_error = await own[described.server].call(described.name, arguments)
        if is_error:
            raise MCPToolError(text)
        return text

    @cleanup
    async def close_own_connections(self, state: State) -> None:
        """Close the rollout's own connections."""
        own = self._sessions.pop(state.get(_SESSION, -1), None)
        if own:
            await in_thread(lambda: _close(own))

    @teardown
    async def close_connections(self) -> None:
        """Close the connections that rollouts share, and those that no cleanup closed."""
        for connections in (self._shared, *self._sessions.values()):
            _close(connections)

    def _connect(self) -> dict[str, MCPConnection]:
        opened: dict[str, MCPConnection] = {}
        try:
            for server in self.mcp_servers:
                opened[server.name] = MCPConnection(server).open()
        except BaseException:
            _close(opened)
            raise
        return opened

    def _offer(self, described: MCPTool) -> None:
        if described.name in self.tool_map:
            raise ConfigError(
                f"there are two tools named {described.name!r}; a call could not say which one it "
                f"means. One is of the MCP server {described.server!r}; leave one out."
            )
        function = {
            "name": described.name,
            "description": described.description,
            "parameters": described.parameters,
        }
        schema = {"type": "function", "function": function}
        tool = Tool.of_schema(schema, _Remote(described))  # the server checks what is beyond names
        self.tool_map[tool.name] = tool
        self.oai_tools.append(tool.schema)


class _Remote:
    """Stands for the function of a tool that runs elsewhere."""

    def __init__(self, tool: MCPTool) -> None:
        self.tool = tool
        self.__name__ = tool.name

    async def __call__(self, **arguments: Any) -> Any:
        raise ConfigError(f"the MCP tool {self.tool.name!r} is called by its environment only.")


def _close(connections: Mapping[str, MCPConnection]) -> None:
    for connection in connections.values():
        connection.close()
