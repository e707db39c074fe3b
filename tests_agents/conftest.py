"""Where the agents are installed: environments of their own, which have no rolltree."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agents_kit import PROGRAMS, TASK, WRONG, check_recorded, run
from table import compare, row_of

from rolltree.gateway import app

ROOT = Path(__file__).parents[1]
AGENTS = Path(os.environ.get("ROLLTREE_AGENTS", ROOT / ".venv-agents"))


@pytest.fixture(scope="session")
def agents_python() -> Path:
    """The interpreter of the environment with the agents."""
    return _python(AGENTS)


@pytest.fixture(scope="session")
def apart() -> Callable[[str], Path]:
    """Return the interpreter of an agent that has an environment of its own."""
    return lambda agent: _python(AGENTS / agent)


def _python(environment: Path) -> Path:
    python = environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"the agents are not installed at {python}: run `make test-agents`")
    return python


@pytest.fixture(scope="session")
def from_npm() -> Path:
    """The folder with the packages from npm."""
    if shutil.which("node") is None:
        pytest.skip("Node.js was not found: the agents from npm need it")
    packages = AGENTS / "npm" / "node_modules"
    if not packages.exists():
        pytest.skip(f"the agents from npm are not installed at {packages}: run `make test-agents`")
    return packages


@pytest.fixture(scope="session")
def chat_template(agents_python: Path) -> Callable[[str], str]:
    """Return a vendor's template as `trl` has it, by its name there."""
    (found,) = agents_python.parents[1].glob("lib/python*/site-packages/trl/chat_templates")
    return lambda name: (found / f"{name}.jinja").read_text("utf-8")


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, Any, str], None]:
    """Check what was recorded of an agent, that nothing was refused, and its row of the page."""
    refused: list[str] = []
    answered = app.failure_of_gateway

    def failure_of_gateway(error: Exception) -> Any:
        failure = answered(error)
        refused.append(failure.message)
        return failure

    monkeypatch.setattr(app, "failure_of_gateway", failure_of_gateway)

    def check(agent: str, protocol: str, session: Any, did: str) -> None:
        # Agents leave out what was refused, and go on.
        assert refused == []
        check_recorded(session)
        compare(row_of(agent, protocol, session, did))

    return check


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of an agent, which has nothing else."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder that an agent works in."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "add.py").write_text(WRONG)
    return tmp_path / "work"


OPENCODE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_PURE": "1",
    "npm_config_offline": "true",  # it installs its plugin kit, and goes on without
}


@pytest.fixture
def opencode(from_npm: Path, home: Path, work: Path) -> Callable[[Any], Awaitable[str]]:
    """Run OpenCode, and return what it printed."""

    async def play(s: Any) -> str:
        options = {"baseURL": s.base_url, "apiKey": s.api_key}
        limit = {"context": 200_000, "output": 8192}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "gateway", "options": options}
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "model": "gateway/any",
            "provider": {"gateway": {**provider, "models": {"any": {"limit": limit}}}},
        }
        (work / "opencode.json").write_text(json.dumps(settings))
        return await run([from_npm / ".bin" / "opencode", "run", TASK], s, home, work, **OPENCODE)

    return play


@pytest.fixture
def aider(apart: Callable[[str], Path], home: Path, work: Path) -> Callable[[Any], Awaitable[str]]:
    """Run aider, and return what it printed."""
    command = [apart("aider").parent / "aider", "--model=openai/gpt-4o", "--edit-format=diff"]
    command += ["--analytics-disable", "--no-check-update", "--no-show-release-notes"]
    command += ["--no-git", "--yes-always", f"--message={TASK}", "add.py"]
    prices = home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"gpt-4o": {}}')  # it would fetch an empty list, or none
    return lambda session: run(command, session, home, work, OPENAI_API_BASE=session.base_url)


@pytest.fixture
def vercel(from_npm: Path, home: Path, work: Path) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Run the program that uses the AI SDK, and return what its last line says."""
    (work / "node_modules").symlink_to(from_npm)
    shutil.copy(PROGRAMS / "vercel_loop.mjs", work)

    async def play(session: Any, api: str, how: str) -> Any:
        said = await run(["node", "vercel_loop.mjs", api, how], session, home, work)
        return json.loads(said.splitlines()[-1])

    return play
