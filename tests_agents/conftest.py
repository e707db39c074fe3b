"""Where the agents are installed: an environment of their own, which has no rolltree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("ROLLTREE_AGENTS", ROOT / ".venv-agents")) / "bin" / "python"


@pytest.fixture(scope="session")
def agents_python() -> Path:
    """The interpreter of the environment with the agents."""
    if not PYTHON.exists():
        pytest.skip(f"the agents are not installed at {PYTHON}: run `make test-agents`")
    return PYTHON
