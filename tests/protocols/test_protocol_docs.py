"""The Python blocks of the pages on protocols and credit run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "num_blocks"), [("protocols.md", 3), ("credit.md", 2)])
def test_the_page(name, num_blocks):
    text = (DOCS / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == num_blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
