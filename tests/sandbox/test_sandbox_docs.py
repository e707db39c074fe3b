"""The Python blocks of docs/sandbox.md run."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "sandbox.md"


def test_examples(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "sandbox.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.splitlines() == ["12 exit 0", "21", "False", "['python']"]
