"""An MCP server over standard input and output with two tools."""

from mcp.server import MCPServer

server = MCPServer("words")


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Return the text in capitals, several times."""
    return " ".join([text.upper()] * times)


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(f"cannot do {text}")


server.run("stdio")
