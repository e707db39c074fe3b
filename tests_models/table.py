"""docs/models.md: `python -m tests_models.table` writes it, with names of rows only those."""

from __future__ import annotations

import argparse
import gc
import math
import re
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers.utils import logging

from tests_models.architectures import ALIASES, NOT_CAUSAL, ROWS, make_model
from tests_models.check import Outcome, check_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- rows: python -m tests_models.table -->\n", "<!-- end -->\n"
COUNTS, COUNTS_END = "<!-- counts -->\n", "<!-- end of counts -->\n"
HEAD = (
    "| architecture | trains as | gradient error | engine | logprob error | why not more |\n"
    "|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Line:
    """A row of the page. The verdict is the same on every machine; errors are not."""

    name: str
    trains: str
    gradient: str
    engine: str
    logprob: str
    why: str

    @property
    def verdict(self) -> tuple[str, str]:
        """Return what the tests compare."""
        return self.trains, self.engine

    def __str__(self) -> str:
        cells = (self.name, self.trains, self.gradient, self.engine, self.logprob, self.why)
        return f"| {' | '.join(cells)} |\n"


def line_of(name: str, outcome: Outcome) -> Line:
    """Return what the page says of an outcome."""
    served = outcome.engine is not None
    why = "; ".join(
        dict.fromkeys(
            text
            for key, refusal in outcome.reasons.items()
            if key in ("tree", "engine") or outcome.trains == "refused"
            for text in [f"{'engine' if key == 'engine' else 'trees'}: {reason(refusal)}"]
        )
    )
    if outcome.wrong:
        why = "; ".join(outcome.wrong).replace("|", "/")
    return Line(
        name,
        "**wrong**" if any("engine" not in w for w in outcome.wrong) else outcome.trains,
        power(max(outcome.gradient.values())) if outcome.gradient else "",
        "**wrong**"
        if any("engine" in w for w in outcome.wrong)
        else ("exact" if served else "refused"),
        power(outcome.engine) if served else "",
        why,
    )


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
    served = sum(line.engine == "exact" for line in lines)
    counts = (
        f"Of {len(lines)} rows, {trees} train on trees and {only_rows} row by row; the embedded "
        f"engine serves {served}.\n\nWhat no row stands for:\n\n"
    )
    groups = "".join(f"- {what}: {', '.join(names)};\n" for what, names in NOT_CAUSAL.items())
    same = ", ".join(f"{name} as {other}" for name, other in ALIASES.items())
    listed = f"{COUNTS}{counts}{groups}- the same under another name: {same}.\n{COUNTS_END}"
    return re.sub(f"{COUNTS}.*?{COUNTS_END}", lambda _: listed, text, flags=re.S)


def quiet() -> None:
    """Silence what building tiny models warns of, and use one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()


def measure(name: str) -> Line:
    """Return a row as it is now."""
    outcome = check_model(lambda seed: make_model(name, seed))
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
