"""Shows a comparison of stored runs: tables for the terminal, Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table

from rolltree._helpers.redact import shown
from rolltree.narrator.words import short
from rolltree.records import ComparedPair, RunComparison
from rolltree.reports.formatting import Cell, safe_text, text_table

_TEXT_LIMIT = 60
_NAMES = {
    "num_calls": "calls",
    "num_prompt_tokens": "prompt tokens",
    "num_completion_tokens": "sampled tokens",
    "total_ms": "time, ms",
    "cost": "cost, $",
}


def comparison_parts(comparison: RunComparison) -> list[RenderableType]:
    """Return the printed parts: the sentences, measures and changed examples of each pair."""
    parts: list[RenderableType] = []
    for pair in comparison.pairs:
        parts += ["", *(safe_text(line) for line in pair.sentences), "", _measures(pair)]
        parts += ["", safe_text(_changed(pair))]
        if pair.shown:
            parts.append(_examples(pair))
    # Without the empty line before the first pair.
    return parts[1:]


def comparison_markdown(comparison: RunComparison) -> str:
    """Return Markdown, with the text of runs and models in code spans."""
    lines: list[str] = []
    for pair in comparison.pairs:
        lines += [f"### {_code(pair.b)} against {_code(pair.a)}", ""]
        # Names of runs and models may hold Markdown.
        named = {pair.a: _code(pair.a), pair.b: _code(pair.b)}
        lines += [*pair.sentences_for(named[pair.a], named[pair.b]), ""]
        heads = ["", named[pair.a], named[pair.b], "difference", _interval_name(pair), ""]
        rows = [
            # An environment chooses the names of its metrics; the other names are rolltree's.
            [_code(name) if name.startswith(("metric/", "env/")) else name, *rest]
            for name, *rest in _rows(pair)
        ]
        lines += [*_table(heads, rows, "lrrrll"), "", _changed(pair, named), ""]
        if pair.shown:
            texts = [[*map(_code, row[:1]), row[1], *map(_code, row[2:])] for row in _texts(pair)]
            lines += [*_table(_heads(pair, named), texts, "lllll"), ""]
    return "\n".join(lines).rstrip() + "\n"


def _measures(pair: ComparedPair) -> Table:
    sides = (safe_text(name, limit=40) for name in (pair.a, pair.b))
    heads: list[Cell] = ["", *sides, "difference", _interval_name(pair), ""]
    return text_table(heads, _rows(pair), "lrrrll", limit=_TEXT_LIMIT)


def _interval_name(pair: ComparedPair) -> str:
    return f"{100 * pair.reward.confidence:.4g} % interval"


def _rows(pair: ComparedPair) -> Iterable[list[str]]:
    """Yield name, A, B, difference, interval and verdict of every measure."""
    for name, found in pair.measures.items():
        gain = found.difference
        bounds = "-"
        if gain.low is not None and gain.high is not None:
            bounds = f"[{_number(gain.low, '+')}, {_number(gain.high, '+')}]"
        yield [
            _NAMES.get(name, name),
            _number(found.before.mean),
            _number(found.after.mean),
            _number(gain.mean, "+"),
            bounds,
            found.verdict,
        ]


def _number(value: float, sign: str = "") -> str:
    """Return a number with three decimals, or in a form that its size needs.

    >>> [_number(0.14), _number(5837.519, "+"), _number(0.0000312)]
    ['0.140', '+5,837.5', '3.12e-05']
    """
    size = abs(value)
    # Values below 1e-12 come from rounding of equal means, and are shown as 0.
    form = ".3f" if 0.001 <= size < 100 or size < 1e-12 else ",.1f" if size >= 100 else ".2e"
    return f"{value:{sign}{form}}"


def _changed(pair: ComparedPair, named: dict[str, str] | None = None) -> str:
    a, b = (named or {}).get(pair.a, pair.a), (named or {}).get(pair.b, pair.b)
    total = pair.reward.difference.num_examples
    others = len(pair.changes) - pair.num_lost - pair.num_won
    said = f"{pair.num_lost} examples pass with {a} and not with {b}, {pair.num_won} the other way"
    said += f", {others} more have another reward" if others else ""
    return f"{said}, of {total}." + (" The first ones:" if pair.shown else "")


def _heads(pair: ComparedPair, named: dict[str, str]) -> list[str]:
    return [
        "example",
        "reward",
        "question",
        f"answers of {named[pair.a]}",
        f"answers of {named[pair.b]}",
    ]


def _texts(pair: ComparedPair) -> Iterable[list[str]]:
    """Yield example, rewards, question and both answers of the changed examples."""
    # Texts were read only for the first changes.
    for change, (before, after) in zip(pair.changes, pair.shown, strict=False):
        rewards = f"{_number(change.reward_a)} → {_number(change.reward_b)}"
        answers = (short(" | ".join(side.answers), _TEXT_LIMIT) for side in (before, after))
        example = change.example
        name = str(example[2]) if isinstance(example, tuple) else str(example)
        yield [name, rewards, short(before.question or after.question, _TEXT_LIMIT), *answers]


def _examples(pair: ComparedPair) -> Table:
    table = Table(box=None)
    for head in _heads(pair, {name: name for name in (pair.a, pair.b)}):
        table.add_column(safe_text(head, limit=40), overflow="fold")
    for row in _texts(pair):
        table.add_row(*map(safe_text, row))
    return table


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> list[str]:
    marks = {"l": "---", "r": "---:"}
    lines = [heads, [marks[letter] for letter in align], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _code(text: str) -> str:
    """Return text as a code span, which is safe in a table, too."""
    # A backtick would end the code span, and a bar the cell; the rest would be read as Markdown.
    line = " ".join(shown(text).split()).replace("`", "'").replace("|", "¦")
    return f"`{line}`" if line else ""
