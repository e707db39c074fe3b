"""The table of docs/agents-tested.md. The tests compare its rows with what they measure.

With `ROLLTREE_AGENTS_TABLE=write` in the environment they write the rows that differ.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from agents_kit import causes

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "agents-tested.md"
HEAD = (
    "| agent | version | protocol | calls | breaks | sampled tokens trained | taken without effect "
    "| what it did |\n|---|---|---|---|---|---|---|---|\n"
)
PACKAGES = {
    "Codex CLI": "@openai/codex",
    "Claude Code": "@anthropic-ai/claude-code",
    "OpenCode": "opencode-ai",
    "Qwen Code": "@qwen-code/qwen-code",
    "Vercel AI SDK": "ai",
    "aider": "aider-chat",
    "OpenHands SDK": "openhands-sdk",
    "mini-swe-agent": "mini-swe-agent",
    "openai-agents": "openai-agents",
    "pydantic-ai": "pydantic-ai-slim[anthropic]",
    "LangGraph": "langgraph",
    "smolagents": "smolagents[openai]",
    "crewai": "crewai",
    "autogen": "autogen-agentchat",
    "dspy": "dspy",
}
"""The agents in the order of the page, and the packages that they are installed from."""


def versions() -> dict[str, str]:
    """Return the pinned version of each package."""
    pinned: dict[str, str] = json.loads((HERE / "package.json").read_text())["dependencies"]
    for listed in (HERE / "requirements.txt", *HERE.glob("apart/*.txt")):
        pinned |= dict(re.findall(r"^([^#\s=]+)==(\S+)$", listed.read_text(), re.MULTILINE))
    return pinned


def row_of(agent: str, protocol: str, session: Any, did: str) -> str:
    """Return the row of an agent whose calls were all recorded, each token once."""
    package = PACKAGES[agent]
    found = causes(session)
    notes = ", ".join(f"`{name}`" for name in sorted(session.notes))
    cells = (
        agent,
        f"`{package}` {versions()[package]}",
        protocol,
        str(len(session.trajectory)),
        ", ".join([str(len(found)), *(f"`{cause}`" for cause in sorted(set(found)))]),
        _trained(len(session.left_out)),
        notes,
        did,
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _trained(num_left_out: int) -> str:
    calls = "a call" if num_left_out == 1 else f"{num_left_out} calls"
    return f"all, once, but for {calls} beside the task" if num_left_out else "all, once"


def compare(row: str) -> None:
    """Fail unless the page has the row; or write it there."""
    page = PAGE.read_text("utf-8")
    if row in page:
        return
    assert os.environ.get("ROLLTREE_AGENTS_TABLE") == "write", (
        f"docs/agents-tested.md does not say {row!r}. If this is how it should be, run "
        "`ROLLTREE_AGENTS_TABLE=write make test-agents`."
    )
    before, _, rest = page.partition(HEAD)
    rows = re.match(r"(?:\|.*\n)*", rest)
    assert rows is not None
    known = {_key(each): each for each in rows[0].splitlines(keepends=True)} | {_key(row): row}
    order = list(PACKAGES)
    made = sorted(known.items(), key=lambda each: (order.index(each[0][0]), each[0][1]))
    body = "".join(each for _, each in made)
    PAGE.write_text(f"{before}{HEAD}{body}{rest[rows.end() :]}", "utf-8")


def _key(row: str) -> tuple[str, str]:
    cells = [cell.strip() for cell in row.split("|")]
    return cells[1], cells[3]
