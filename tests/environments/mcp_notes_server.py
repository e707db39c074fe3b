"""A real MCP server for tests: `python mcp_notes_server.py stdio` or `... http PORT`."""

import asyncio
import os
import sys

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="CRITICAL")
notes = []


@server.tool()
def add_note(text: str, times: int = 1) -> str:
    """Write a note down."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool()
def fail(reason: str) -> str:
    """Fail on purpose."""
    raise ToolError(reason)


@server.tool()
def stumble(text: str) -> str:
    """Fail in the protocol, as servers do whose tool raises."""
    raise MCPError(-32603, f"internal error at {text}")


@server.tool()
async def doze(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """End the server's process."""
    os._exit(3)


@server.tool()
def variables() -> str:
    """Name the environment variables that the server sees."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import uvicorn

        uvicorn.run(
            server.streamable_http_app(), host="127.0.0.1", port=int(sys.argv[2]), log_level="error"
        )
