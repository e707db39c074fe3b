"""docs/models.md: `python -m tests_models.table` writes it, with names of rows only those."""

from __future__ import annotations

import argparse
import gc
import math
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path

from tests_models.architectures import ALIASES, NOT_CAUSAL, ROWS
from tests_models.check import Outcome, check_model, quiet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- rows: python -m tests_models.table -->\n", "<!-- end -->\n"
COUNTS, COUNTS_END = "<!-- counts -->\n", "<!-- end of counts -->\n"
HEAD = (
    "| architecture | trains as | gradient error | two ranks | LoRA | engine | logprob error "
    "| why not more |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Line:
    """A row of the page. The verdict is the same on every machine; errors are not."""

    name: str
    trains: str
    gradient: str
    ranks: str
    adapters: str
    engine: str
    logprob: str
    why: str

    @property
    def verdict(self) -> tuple[str, ...]:
        """Return what the tests compare."""
        return self.trains, self.ranks, self.adapters, self.engine

    def __str__(self) -> str:
        return f"| {' | '.join(astuple(self))} |\n"


def line_of(name: str, outcome: Outcome) -> Line:
    """Return what the page says of an outcome."""
    refused = outcome.trains == "refused"
    why = "; ".join(
        dict.fromkeys(
            f"{LABELS.get(key, 'trees')}: {reason(refusal)}"
            for key, refusal in outcome.reasons.items()
            if key in ("tree", *LABELS) or refused
        )
    )
    if outcome.wrong:
        why = " ".join("; ".join(outcome.wrong).replace("|", "/").split())

    def cell(column: str, error: float | None, exact: str = "exact") -> str:
        if any(_column(text) == column for text in outcome.wrong):
            return "**wrong**"
        return "refused" if error is None else exact

    return Line(
        name,
        cell("", 0, outcome.trains),
        power(max(outcome.gradient.values())) if outcome.gradient else "",
        cell("two ranks", outcome.ranks),
        cell("adapters", outcome.adapters, "exact" if outcome.in_peft else "merged"),
        cell("engine", outcome.engine),
        "" if outcome.engine is None else power(outcome.engine),
        why,
    )


LABELS = {"two ranks": "two ranks", "adapters": "LoRA", "engine": "engine"}
"""What has a column of its own, and its name in the reasons."""


def _column(wrong: str) -> str:
    return next((name for name in LABELS if wrong.startswith(name)), "")


def power(error: float) -> str:
    """Return the next power of ten: what is measured differs between machines.

    >>> power(2.3e-6), power(0.0)
    ('1e-5', '0')
    """
    return f"1e{math.ceil(math.log10(error))}" if error > 0 else "0"


def reason(refusal: str) -> str:
    """Return the part of a refusal that says why."""
    text = refusal.replace("\n", " ").replace("|", "/")
    found = re.search(r"(?:cannot be trained[^:]*|cannot run \w+): (.*?)\.(?: |$)", text)
    text = found[1] if found else text.partition(". ")[0]
    text = re.sub(r" \((?:by|in|of)[^)]*\d[^)]*\)", "", text)
    text = re.sub(r"<[^<>]*>", "...", text)
    return text if len(text) <= 160 else text[:160].rpartition(" ")[0] + " ..."


def read(page: str) -> dict[str, Line]:
    """Return the rows of a page by name."""
    _, _, rest = page.partition(BEGIN)
    body = rest.partition(END)[0].removeprefix(HEAD)
    lines = [[c.strip() for c in text.strip("|").split("|")] for text in body.splitlines()]
    return {cells[0]: Line(*cells) for cells in lines}


def with_rows(page: str, rows: dict[str, Line]) -> str:
    """Return the page with these rows, and with the counts and lists that follow from them."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    body = "".join(str(rows[name]) for name in ROWS if name in rows)
    return f"{_with_counts(before, rows)}{BEGIN}{HEAD}{body}{END}{after}"


def _with_counts(text: str, rows: dict[str, Line]) -> str:
    lines = [line for name, line in rows.items() if name in ROWS]
    trees, only_rows = (sum(line.trains == kind for line in lines) for kind in ("tree", "rows"))
    served, together = (
        sum(getattr(line, column) == "exact" for line in lines) for column in ("engine", "ranks")
    )
    adapted, in_peft = (
        sum(line.adapters in kinds for line in lines) for kinds in (("exact", "merged"), ("exact",))
    )
    counts = (
        f"Of {len(lines)} models, {trees} train on trees, {only_rows} row by row, {together} on "
        f"two ranks and {adapted} with LoRA ({in_peft} of them write an adapter for peft); the "
        f"embedded engine serves {served}.\n\nNot covered by any row:\n\n"
    )
    groups = "".join(f"- {what}: {', '.join(names)};\n" for what, names in NOT_CAUSAL.items())
    same = ", ".join(f"{name} as {other}" for name, other in ALIASES.items())
    listed = f"{COUNTS}{counts}{groups}- the same under another name: {same}.\n{COUNTS_END}"
    return re.sub(f"{COUNTS}.*?{COUNTS_END}", lambda _: listed, text, flags=re.S)


def measure(name: str) -> Line:
    """Return a row as it is now."""
    outcome = check_model(name)
    gc.collect()
    return line_of(name, outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="none: all")
    asked = parser.parse_args().rows or ROWS
    if unknown := sorted({*asked} - {*ROWS}):
        parser.error(f"there is no row {', '.join(unknown)}")
    page = PAGE.read_text(encoding="utf-8")
    rows = {name: line for name, line in read(page).items() if name in ROWS}
    with ProcessPoolExecutor(2, get_context("spawn"), quiet) as pool:
        for line in pool.map(measure, asked):
            rows[line.name] = line
            print(str(line), end="", flush=True)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_rows(page, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
