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
    "| agent | version | protocol | calls | breaks | sampled tokens trained | left out of training "
    "| taken without effect | what it did |\n|---|---|---|---|---|---|---|---|---|\n"
)
PACKAGES = {
    "Codex CLI": "@openai/codex",
    "Claude Code": "@anthropic-ai/claude-code",
    "Claude Code, Qwen3": "@anthropic-ai/claude-code",
    "Claude Code, Qwen3.5": "@anthropic-ai/claude-code",
    "OpenCode": "opencode-ai",
    "goose": "@aaif/goose-binary-linux-x64",
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
    "agno": "agno",
    "Strands Agents": "strands-agents[openai]",
}
"""The agents in the order of the page, and the packages that they are installed from."""


def versions() -> dict[str, str]:
    """Return the pinned version of each package."""
    package = json.loads((HERE / "package.json").read_text())
    pinned: dict[str, str] = package["dependencies"] | package["optionalDependencies"]
    for listed in (HERE / "requirements.txt", *HERE.glob("apart/*.txt")):
        pinned |= dict(re.findall(r"^([^#\s=]+)==(\S+)$", listed.read_text(), re.MULTILINE))
    return pinned


def row_of(agent: str, protocol: str, session: Any, did: str) -> str:
    """Return the row of an agent whose calls were all recorded, each token once."""
    package = PACKAGES[agent]
    found = causes(session)
    notes = ", ".join(f"`{name}`" for name in sorted(session.notes))
    left_out = [_begins(session.trajectory[call]) for call in sorted(session.left_out)]
    cells = (
        agent,
        f"`{package}` {versions()[package]}",
        protocol,
        str(len(session.trajectory)),
        ", ".join([str(len(found)), *(f"`{cause}`" for cause in sorted(set(found)))]),
        f"once, of {'all' if not left_out else len(session.trajectory) - len(left_out)} calls",
        ", ".join([str(len(left_out)), *(f"`{each}`" for each in left_out)]),
        notes,
        did,
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _begins(step: Any) -> str:
    """Return how the instructions of a call begin."""
    return str(re.split(r"[.\n(]", step["prompt"][0]["content"])[0].strip()[:60])


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
