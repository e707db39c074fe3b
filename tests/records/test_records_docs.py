"""The page of records: its column tables are those of the code."""

import re
from pathlib import Path

import pytest

from rolltree.records.columns import SFT, TABLES

DOCUMENTED = {**TABLES, "sft": SFT}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "records.md"
SECTION = re.compile(r"<!-- columns: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def columns_table(name):
    """Return the columns of a table as Markdown."""
    lines = ["| column | type | what it holds |", "|---|---|---|"]
    lines += [f"| `{c.name}` | {c.kind} | {c.description} |" for c in DOCUMENTED[name]]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_page_documents_every_column_as_the_code_does(name):
    shown = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
    assert shown[name] == columns_table(name)
