"""The code in the documentation runs, and its assertions hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["token-tree.md", "samples.md"])
def test_every_block_runs_in_order(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)
    assert sum(block.count("assert") for block in blocks) >= 8
