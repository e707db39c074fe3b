"""The ending of every benchmark: a line per bar, the figures on the last line, `--check`, `--json`.

A script makes its parser with `make_parser`, measures, and returns what `conclude` returns:

    speed = Bar.at_least("tokens per second", 812.4, 500)
    return conclude(options, [speed], {"rows": rows}, lambda: print_table(rows))

It needs the standard library only: some scripts also run in environments without rolltree.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """The bound of one figure.

    Fields:
        what: what the figure is, with its unit; it reads well after the number.
        value: the figure.
        bar: the promise, in words or as a comparison (">= 5").
        met: whether it is kept.
    """

    what: str
    value: float
    bar: str
    met: bool

    @classmethod
    def at_least(cls, what: str, value: float, bound: float) -> Bar:
        return cls(what, value, f">= {bound:g}", value >= bound)

    @classmethod
    def at_most(cls, what: str, value: float, bound: float) -> Bar:
        return cls(what, value, f"<= {bound:g}", value <= bound)

    @classmethod
    def below(cls, what: str, value: float, bound: float) -> Bar:
        return cls(what, value, f"< {bound:g}", value < bound)

    @classmethod
    def above(cls, what: str, value: float, bound: float) -> Bar:
        return cls(what, value, f"> {bound:g}", value > bound)

    @property
    def number(self) -> str:
        """The value in three digits, all of them before the point."""
        return f"{self.value:,.0f}" if abs(self.value) >= 100 else f"{self.value:.3g}"


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--check` and `--json`; the first line of `doc` says what it is for."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def conclude(
    options: argparse.Namespace,
    bars: Sequence[Bar],
    results: Any,
    show: Callable[[], None] = lambda: None,
    *,
    also: Sequence[str] = (),
) -> int:
    """Print the results and the bars, and return the exit status.

    With `--json` that is one object, `{"results": ..., "bars": [...]}`. Otherwise `show()` prints
    the results, a line for each bar follows ("ok" or "MISS"), and the last line has the figures of
    all bars and what is in `also`; without bars there are no such lines. The status is 1 with
    `--check` when a bar is missed, else 0.
    """
    if options.json:
        print(json.dumps({"results": results, "bars": [asdict(bar) for bar in bars]}))
    else:
        show()
        if bars:
            print()
        for bar in bars:
            print(f"{'ok  ' if bar.met else 'MISS'} {bar.what}: {bar.number} (bar {bar.bar})")
        if bars:
            print("figures: " + "; ".join([*(f"{bar.number} {bar.what}" for bar in bars), *also]))
    return 1 if options.check and not all(bar.met for bar in bars) else 0
