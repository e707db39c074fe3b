"""`MCPEnv`: the tools of MCP servers, and the connections to them.

Each connection has a thread with its own event loop, because the SDK ties a connection
to one task, while rollouts may run in several event loops.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rolltree._helpers.threads import run_in_pool
from rolltree.environments.lifecycle import cleanup, teardown
from rolltree.environments.tool_env import ToolEnv
from rolltree.environments.tools import Tool, ToolUnavailable
from rolltree.values.errors import ConfigError, import_extra
from rolltree.values.types import State, ToolSchema

logger = logging.getLogger("rolltree.environments")

_CLOSE_S = 10.0
"""How long a connection may take to close before it is cancelled, and after."""
_LIST_S = 30.0
"""How long a server may take to list its tools before it counts as busy."""


@dataclass(frozen=True, slots=True)
class MCPServer:
    """How to reach one server: by `command` (stdio), or by `url` (streamable HTTP)."""

    name: str
    # A program that speaks MCP on stdin and stdout, and its arguments.
    command: str | None = None
    args: tuple[str, ...] = ()
    # The program's environment variables, in addition to a few harmless ones that the SDK passes on
    # (PATH, HOME, ...): servers must not get this process's API keys.
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # For each call.
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ConfigError(
                f"MCP server {self.name!r} needs either a command (stdio) or a url (HTTP), and "
                "not both."
            )

    @classmethod
    def of(cls, given: MCPServer | Mapping[str, Any]) -> MCPServer:
        """Return `given`, or the server that a mapping of the same fields describes."""
        if isinstance(given, MCPServer):
            return given
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown or "name" not in given:
            what = f"has the unknown key {unknown[0]!r}" if unknown else "has no name"
            raise ConfigError(
                f"an MCP server {what}. Its keys are {', '.join(cls.__dataclass_fields__)}."
            )
        return cls(**{**given, "args": tuple(given.get("args") or ())})


class MCPConnection:
    """An open connection to one server. Its methods may be called from any thread or loop."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        # Whether a call found the server gone, or silent.
        self.is_lost = False
        # Sets, unlike counts, may be changed from several threads.
        self._in_flight: set[Future[Any]] = set()
        # The SDK ties a connection to the task that opened it, and rollouts come from several
        # loops.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"rolltree-mcp-{server.name}", daemon=True
        )
        self._opened: Future[Any] = Future()
        self._closing = asyncio.Event()
        self._task: Future[None] | None = None
        # The same in its own loop.
        self._living: asyncio.Task[None] | None = None

    def open(self) -> MCPConnection:
        """Start the server or connect to it, and do the MCP handshake.

        Raises:
            ConfigError: the `mcp` package is missing.
            ToolUnavailable: the server does not answer within its time limit.
        """
        _sdk()
        self._thread.start()
        self._task = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self._opened.result(self.server.timeout_s)
        except BaseException as error:  # including Ctrl-C while it waits
            self.close()
            if isinstance(error, Exception):
                raise ToolUnavailable(
                    f"the MCP server {self.server.name!r} could not be reached: {_reason(error)}. "
                    "Its tools cannot be offered. Check its command or url."
                ) from error
            raise
        return self

    def tools(self) -> list[ToolSchema]:
        """Return all of the server's tools as OpenAI schemas.

        Raises:
            ToolUnavailable: the server is gone.
        """
        found: list[ToolSchema] = self._submit(self._list()).result()
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool and return the text of its result, and whether it is an error.

        A call that takes longer than the server's time limit is an error, too.

        Raises:
            ToolUnavailable: the server is gone, or answers nothing in time.
        """
        call = self._submit(self._call(name, dict(arguments)))
        self._in_flight.add(call)
        try:
            found: tuple[str, bool] = await asyncio.wrap_future(call)
            return found
        finally:
            self._in_flight.discard(call)

    async def is_gone(self) -> bool:
        """Whether the server has died since its last answer, which costs it a listing of its tools.

        Not asked while calls are in flight, which notice it themselves, or once it is closed.
        """
        if self._in_flight or self._closing.is_set():
            return False
        try:
            # A server that does not answer in time may be busy.
            return await asyncio.wrap_future(self._submit(self._lists())) is False
        except ToolUnavailable:
            return True

    def close(self) -> None:
        """Close the connection and end a server that was started by command. Idempotent."""
        if self._loop.is_closed():
            return
        for cancel in (False, True):
            if self._task is None:
                break
            self._loop.call_soon_threadsafe(self._end, cancel)
            try:
                self._task.result(_CLOSE_S)
            except Exception as error:  # noqa: BLE001  the connection is dropped in any case
                logger.debug("MCP server %s did not close: %r", self.server.name, error)
            # If the loop stopped before the task has cleaned up, the server would go on.
            if self._task.done():
                break
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _end(self, cancel: bool) -> None:
        self._closing.set()
        # While it still starts, nothing waits for the event.
        if self._living is not None and (cancel or not self._opened.done()):
            self._living.cancel()

    def _submit(self, work: Any) -> Future[Any]:
        if self._task is None or self._task.done() or self._loop.is_closed():
            # A coroutine that is never awaited would warn when it is collected.
            work.close()
            raise ToolUnavailable(
                f"the connection to the MCP server {self.server.name!r} is closed."
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _live(self) -> None:
        """Open the connection, and hold it open until `close`, all in one task."""
        self._living = asyncio.current_task()
        try:
            async with AsyncExitStack() as stack:
                client = await _enter(stack, self.server)
                self._opened.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            # An error before the connection is open is raised by `open`; a later one ends the task,
            # which `_submit` notices.
            if not self._opened.done():
                self._opened.set_exception(error)
                return
            raise

    async def _list(self) -> list[ToolSchema]:
        client, found, cursor = self._opened.result(), [], None
        while True:
            page = await self._guarded(client.list_tools(cursor=cursor), "listing its tools")
            for tool in page.tools:
                schema = {"type": "object", "properties": {}, **tool.input_schema}
                schema.pop("$schema", None)
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": schema,
                }
                found.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if not cursor:
                return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        from mcp import MCPError

        client = self._opened.result()
        try:
            result = await self._guarded(client.call_tool(name, arguments), f"calling {name!r}")
        except MCPError as error:
            # The server is up, but rejects the call.
            if error.code in _PROTOCOL_ERRORS:
                return str(error), True
            raise self._lost(
                ToolUnavailable(f"the MCP server {self.server.name!r} failed at {name!r}: {error}")
            ) from error
        except ToolUnavailable as error:
            # The model's arguments may have made the call slow.
            if not isinstance(error.__cause__, TimeoutError) or not await self._lists():
                raise self._lost(error) from error.__cause__
            return str(error), True
        return _result_text(result), bool(result.is_error)

    def _lost(self, error: ToolUnavailable) -> ToolUnavailable:
        """Return the failure of a call in which the server was lost: the call may have ended it."""
        self.is_lost, error.kind = True, "episode"
        return error

    async def _lists(self) -> bool | None:
        """Whether the server lists its tools, as MCP has no ping any more; None: not in time."""
        try:
            async with asyncio.timeout(_LIST_S):
                await self._opened.result().list_tools()
        except TimeoutError:
            return None
        except Exception:  # noqa: BLE001  transports raise their own
            return False
        return True

    async def _guarded(self, work: Any, what: str) -> Any:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self.server.timeout_s):
                return await work
        except MCPError:
            raise
        except TimeoutError as error:
            raise ToolUnavailable(
                f"the MCP server {self.server.name!r} took more than {self.server.timeout_s:g} s "
                f"for {what}."
            ) from error
        except Exception as error:  # transports raise their own
            raise ToolUnavailable(
                f"the MCP server {self.server.name!r} failed at {what}: {_reason(error)}"
            ) from error


_PROTOCOL_ERRORS = (-32600, -32601, -32602, -32603)
"""JSON-RPC errors of a server that is up: invalid request, method or parameters, internal error."""


async def _enter(stack: AsyncExitStack, server: MCPServer) -> Any:
    sdk = _sdk()
    if server.command is not None:
        target: Any = sdk.StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env)
        )
    elif server.headers and server.url is not None:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        http = httpx2.AsyncClient(headers=dict(server.headers), timeout=server.timeout_s)
        await stack.enter_async_context(http)
        target = streamable_http_client(server.url, http_client=http)
    else:
        target = server.url
    return await stack.enter_async_context(sdk.Client(target))


def _sdk() -> Any:
    mcp = import_extra("mcp", "an MCPEnv", "rolltree[mcp]")
    if not hasattr(mcp, "Client"):
        raise ConfigError("MCP tools need mcp 2 or newer; this one has no `mcp.Client`. Update it.")
    return mcp


def _result_text(result: Any) -> str:
    parts = [
        part.text if part.type == "text" else f"[{part.type} content is left out]"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        return str(result.structured_content)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    # The SDK's task groups wrap the cause, often several times.
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_SESSION = "mcp_session"


class MCPToolError(Exception):
    """An MCP tool returned an error; its text is sent to the model."""


class MCPEnv(ToolEnv):
    """Offer the tools of MCP servers, and plain functions.

    The environment connects to the servers when it is made, to learn their tools, and disconnects
    in its teardown. If a server cannot be reached during a rollout, the rollout fails; an error
    that a tool returns is sent to the model. If a server is lost in a call, the rollout ends and is
    scored, since the call may be the cause; the next call connects again. A shared server that died
    between calls is nobody's doing, and the next call connects again, too.

    Args:
        mcp_servers: `MCPServer`s, or mappings of their fields.
        isolated: every rollout has its own connections, so a server started by command is a
            process per rollout and its state is not shared between episodes.
        tools: plain functions to offer as well.
        settings: `ToolEnv`'s.

    Raises:
        ConfigError: the `mcp` package is missing, or two tools have the same name.
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
        self._reopening = threading.Lock()
        self._sessions: dict[int, dict[str, MCPConnection]] = {}
        self._shared: dict[str, MCPConnection] = {}
        super().__init__(tools=tools, **settings)
        self._shared = self._connect()
        try:
            for server, connection in self._shared.items():
                # Only the names of arguments are checked here; the server checks the rest.
                for schema in connection.tools():
                    self.add_tool(Tool.of_schema(schema, _RemoteTool(server)))
        except BaseException:  # including Ctrl-C
            _close(self._shared)
            raise
        # They were opened to learn the tools; every rollout opens its own.
        if isolated:
            _close(self._shared)

    async def setup_state(self, state: State) -> State:
        """Open the rollout's own connections, if it is isolated."""
        if self.isolated:
            number = next(self._numbers)
            self._sessions[number] = await run_in_pool(self._connect)
            state[_SESSION] = number
        return state

    async def run_tool(self, tool: Tool, arguments: dict[str, Any], state: State) -> Any:
        """Call the tool on its server, or call the plain function."""
        if not isinstance(tool.func, _RemoteTool):
            return await super().run_tool(tool, arguments, state)
        own = self._sessions[state[_SESSION]] if self.isolated else self._shared
        connection = own[tool.func.server]
        # Nobody's call is the cause of a death between calls. A rollout's own server has its state.
        if connection.is_lost or (not self.isolated and await connection.is_gone()):
            connection.is_lost = True
            await run_in_pool(partial(self._reopen, own, tool.func.server))
        text, is_error = await own[tool.func.server].call(tool.name, arguments)
        if is_error:
            raise MCPToolError(text)
        return text

    @cleanup
    async def close_own_connections(self, state: State) -> None:
        """Close the rollout's own connections."""
        own = self._sessions.pop(state.get(_SESSION, -1), None)
        if own:
            await run_in_pool(lambda: _close(own))

    @teardown
    async def close_connections(self) -> None:
        """Close the connections that rollouts share, and those that no cleanup closed."""
        for connections in (self._shared, *self._sessions.values()):
            _close(connections)

    def _reopen(self, own: dict[str, MCPConnection], name: str) -> None:
        """Replace a connection whose server was lost, perhaps in another rollout's call."""
        with self._reopening:
            if own[name].is_lost:
                own[name].close()
                own[name] = MCPConnection(own[name].server).open()

    def _connect(self) -> dict[str, MCPConnection]:
        opened: dict[str, MCPConnection] = {}
        try:
            for server in self.mcp_servers:
                opened[server.name] = MCPConnection(server).open()
        except BaseException:  # including Ctrl-C
            _close(opened)
            raise
        return opened


@dataclass(frozen=True, slots=True)
class _RemoteTool:
    """Stands for the function of a tool that a server runs."""

    server: str

    async def __call__(self, **arguments: Any) -> Any:
        raise ConfigError(f"only an MCPEnv can call a tool of the MCP server {self.server!r}.")


def _close(connections: Mapping[str, MCPConnection]) -> None:
    for connection in connections.values():
        connection.close()
