"""docs/agents-tested.md names the versions that `make test-agents` installs."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests_agents"
PAGE = (ROOT / "docs" / "agents-tested.md").read_text("utf-8")
PACKAGE = json.loads((TESTS / "package.json").read_text())
FROM_NPM = PACKAGE["dependencies"] | PACKAGE["optionalDependencies"]
FROM_PYPI = {
    name: version
    for listed in (TESTS / "requirements.txt", *TESTS.glob("apart/*.txt"))
    for name, version in re.findall(r"^([^#\s=]+)==(\S+)$", listed.read_text(), re.MULTILINE)
}
ROWS = re.findall(r"^\| ([^|]+) \| `([^`]+)` (\S+) \| (\w+) \| \d+ \|", PAGE, re.MULTILINE)


def test_the_page_names_the_pinned_versions():
    pinned = FROM_NPM | FROM_PYPI
    assert {name: version for _, name, version, _ in ROWS} == {
        name: pinned[name] for _, name, *_ in ROWS
    }
    assert len(ROWS) == len({(agent, protocol) for agent, _, _, protocol in ROWS}) > 20


def test_every_agent_that_is_installed_has_a_row():
    # The others are what agents or their tests import.
    beside = {"@ai-sdk/anthropic", "@ai-sdk/openai", "anthropic", "autogen-ext[openai]", "fastapi"}
    beside |= {"fastmcp", "langchain-openai", "litellm", "openai", "openhands-tools"}
    assert {name for _, name, *_ in ROWS} == (FROM_NPM.keys() | FROM_PYPI.keys()) - beside


def test_packages_from_npm_are_pinned():
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in FROM_NPM.values())
