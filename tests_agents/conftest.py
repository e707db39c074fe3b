"""Where the agents are installed: environments of their own, which have no rolltree."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents_kit import check_recorded
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
