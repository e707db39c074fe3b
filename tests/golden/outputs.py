"""Outputs of commands in README.md and docs/, on the committed real runs.

    <!-- output: rolltree show runs/demo --transcripts 0 -->
    ```text
    what the command prints
    ```

`cd tests; python -m golden.outputs` (`make docs`) writes what the commands print today, and
`test_docs_outputs.py` compares. Commands run from a folder with the runs of
`golden_kit.REAL_RUNS`, such as `runs/demo`, `environments/` and `examples/`; what the commands of a
page write there lasts to the end of the page. `<!-- output, exit 1: ... -->` says that a command
fails. The clock stands at one day after the runs were made, and stderr is not shown.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from golden_kit import REAL_RUNS, unpack
from rolltree.cli import app
from rolltree.gateway.field_table import CHAT, MESSAGES, RESPONSES, ROWS, TEXT, Row
from rolltree.gateway.tools import TOOL_NOTES
from rolltree.inference.models import resolve_model
from rolltree.records.columns import SFT, TABLES
from rolltree.store.metric_table import metric_rows

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^(?P<head><!-- output(?:, exit (?P<status>\d+))?: (?P<command>rolltree [^\n]*) -->\n```\w*\n)"
    r".*?^```$",
    re.MULTILINE | re.DOTALL,
)
TABLE = re.compile(
    r"(?P<head><!-- (?P<kind>columns|metrics|fields): (?P<name>[^\n]+) -->\n).*?(?=<!-- end -->)",
    re.DOTALL,
)
"""A table of the code: columns of records, metrics of a section, or fields of requests."""
MARK = "<!-- output"
NOW = 1795485600.0  # 2026-11-24, 02:00 UTC
WIDTH = 100


def pages() -> list[Path]:
    """Return the pages with outputs."""
    found = {
        page: page.read_text(encoding="utf-8")
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    }
    return [page for page, text in found.items() if MARK in text or TABLE.search(text)]


def with_tables(text: str) -> str:
    """Return a page with the tables that the code has today."""
    return TABLE.sub(lambda block: block["head"] + _TABLES[block["kind"]](block["name"]), text)


def _columns(name: str) -> str:
    lines = ["| column | type | what it holds |", "|---|---|---|"]
    lines += [f"| `{c.name}` | {c.kind} | {c.description} |" for c in COLUMNS[name]]
    return "\n".join(lines) + "\n"


def _metrics(section: str) -> str:
    lines = ["| metric | unit | meaning | elsewhere |", "|---|---|---|---|"]
    rows = [metric for metric in metric_rows().values() if metric.section == section]
    said = itertools.groupby(rows, lambda each: (each.unit, each.meaning, each.elsewhere))
    for (unit, meaning, elsewhere), names in said:
        shown = ", ".join(f"`{each.name}`" for each in names)
        lines.append(f"| {shown} | {unit} | {meaning} | {elsewhere} |")
    return "\n".join(lines) + "\n"


def _fields(effect: str) -> str:
    lines = [
        "| `chat/completions`, `completions` | `responses` | `messages` | what becomes of it |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        if row.effect == effect:
            columns = [_names(row, CHAT, TEXT), _names(row, RESPONSES), _names(row, MESSAGES)]
            lines.append(f"| {' | '.join(columns)} | {row.why} |")
    if effect == "hint":
        for name, why in TOOL_NOTES.items():
            shown = f"`{name}` of a tool"
            lines.append(f"| {shown} | {shown} | {shown} | {why} |")
    return "\n".join(lines) + "\n"


def _names(row: Row, *paths: str) -> str:
    """Return the fields of a row at these paths; one that is not at all of them, with its path."""
    found: dict[str, list[str]] = {}
    for path, name in row.fields:
        if path in paths:
            found.setdefault(name, []).append(path)
    return ", ".join(
        f"`{name}`" + ("" if len(at) == len(paths) else f" ({at[0]})") for name, at in found.items()
    )


COLUMNS = {**TABLES, "sft": SFT}
_TABLES = {"columns": _columns, "metrics": _metrics, "fields": _fields}


def rewritten(text: str, folder: Path) -> str:
    """Return a page with the outputs that its commands have today, run in a folder for it."""
    text = with_tables(text)
    for name in REAL_RUNS:
        if re.search(rf"runs/{name}\b", text):
            unpack(name, folder / "runs" / name)
    if "rolltree audit" in text:
        resolve_model("smollm2-135m")  # an audit compares text with its tokenizer, once it is there
    for name in ("environments", "examples"):
        (folder / name).symlink_to(ROOT / name)

    def renew(block: re.Match[str]) -> str:
        output = printed(block["command"], int(block["status"] or 0))
        return f"{block['head']}{output}```"

    with _at(folder):
        return BLOCK.sub(renew, text)


def printed(command: str, status: int = 0) -> str:
    """Return what a command prints on stdout.

    Raises:
        AssertionError: it ends with another exit status.
    """
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == status, f"{command}\n{result.output}\n{result.exception!r}"
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())


@contextmanager
def _at(folder: Path) -> Iterator[None]:
    """Work in a folder, on a fixed day, with a terminal of one width."""
    before, began = Path.cwd(), time.monotonic()
    settings = {"COLUMNS": str(WIDTH), "TZ": "UTC", "TERM": "dumb", "NO_COLOR": "1"}
    os.chdir(folder)
    try:
        with (
            patch.dict(os.environ, settings),
            patch("time.time", lambda: NOW + time.monotonic() - began),
        ):
            time.tzset()
            yield
    finally:
        time.tzset()
        os.chdir(before)


def main() -> None:
    """Write the outputs of every page, or of those that are named."""
    names = sys.argv[1:]
    for page in pages():
        if names and page.name not in names:
            continue
        old = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            new = rewritten(old, Path(folder))
        page.write_text(new, encoding="utf-8")
        print(f"{page.name}: {'rewritten' if new != old else 'as it was'}")


if __name__ == "__main__":
    main()
