"""The table of docs/compat.md, from `differences.py`: `python tests_compat/table.py` writes it."""

from __future__ import annotations

from pathlib import Path

from differences import DIFFERENCES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compat.md"
BEGIN, END = "<!-- differences: python tests_compat/table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the rows, each once."""
    rows = dict.fromkeys((row.verifiers, row.here) for row in DIFFERENCES)
    lines = ["| verifiers 0.1.8 | here |", "|---|---|"]
    lines += [f"| {theirs} | {ours} |" for theirs, ours in rows]
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
