"""The page of records: its column tables are those of the code."""

from pathlib import Path

from golden import outputs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "records.md"


def test_the_page_documents_every_column_as_the_code_does():
    text = PAGE.read_text(encoding="utf-8")
    shown = [block["name"] for block in outputs.TABLE.finditer(text)]
    assert sorted(shown) == sorted(outputs.COLUMNS)
    assert outputs.with_tables(text) == text, "`make docs` writes today's columns"
