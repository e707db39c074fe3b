"""The language of `where`: conditions on the columns of a rollout, as SQL and on a row.

Its conditions are joined by `and`: `"reward < 0.5 and metrics/tries >= 2 and task ~ add"`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rolltree._helpers.untrusted import shorten
from rolltree.store.filters import FILTERS, METRIC, check_name, expression, is_metric
from rolltree.store.rows import COLUMNS, StoredRollout
from rolltree.values.errors import ConfigError

_NUMBERS = [
    name for name in FILTERS if COLUMNS[name].sql in ("INTEGER", "REAL", "INTEGER NOT NULL")
]
_CONDITION = re.compile(
    r"""\s*(?P<name>[^\s=!<>~'"]+)\s*(?P<op>!=|<=|>=|!~|=|<|>|~)\s*"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s'"]+)\s*(?P<more>\band\b|$)""",
    re.IGNORECASE,
)
_MAX_CONDITIONS = 100
_SHOWN = 300  # characters of a filter, in an error
_MAX_INTEGER = 2**63 - 1
_WORDS: dict[str, Any] = {"none": None, "null": None, "true": 1, "false": 0}


def _contains(value: Any, text: Any) -> bool:
    return value is not None and str(text) in str(value)


_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "=": ("{} IS ?", operator.eq),
    "!=": ("{} IS NOT ?", operator.ne),
    "<": ("{} < ?", operator.lt),
    "<=": ("{} <= ?", operator.le),
    ">": ("{} > ?", operator.gt),
    ">=": ("{} >= ?", operator.ge),
    "~": ("coalesce(instr({}, ?), 0) > 0", _contains),
    "!~": ("coalesce(instr({}, ?), 0) = 0", lambda value, text: not _contains(value, text)),
}
"""The SQL of each operator, and a function with the same meaning; `~` is "contains"."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a `where` text: a column or `metrics/NAME`, an operator, a value."""

    name: str
    operator: str
    value: Any

    def sql(self) -> tuple[str, Any]:
        """Return the SQL and its value."""
        return _OPERATORS[self.operator][0].format(expression(self.name)), self.value

    def holds(self, row: StoredRollout) -> bool:
        """Whether a row passes."""
        metric = self.name.removeprefix(METRIC)
        value = getattr(row, self.name) if metric == self.name else row.metrics.get(metric)
        if value is None and self.operator in ("<", "<=", ">", ">="):
            return False
        return _OPERATORS[self.operator][1](value, self.value)


@lru_cache(64)
def conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions of a `where` text, all of which must hold.

    Raises:
        ConfigError: the text cannot be read, or compares values that cannot be compared.
    """
    parsed = []
    for name, sign, word, _ in _split(text):
        check_name(name, "filtered")
        parsed.append(_condition(name, sign, word, is_metric(name) or name in _NUMBERS))
    return tuple(parsed)


def parted(text: str, names: Collection[str]) -> tuple[tuple[Condition, ...], str | None]:
    """Return the conditions of a `where` text on the columns `names`, and the text of the others.

    Raises:
        ConfigError: the text cannot be read, or compares values that cannot be compared.
    """
    own: list[Condition] = []
    rest: list[str] = []
    for name, sign, word, whole in _split(text):
        if name not in names:
            rest.append(whole)
        else:
            own.append(_condition(name, sign, word))
    return tuple(own), " and ".join(rest) or None


def _split(text: str) -> list[tuple[str, str, str, str]]:
    """Return the name, operator, value and text of each condition."""
    parts: list[tuple[str, str, str, str]] = []
    at = 0
    while at < len(text) or not parts:
        match = _CONDITION.match(text, at)
        if len(parts) == _MAX_CONDITIONS:
            raise ConfigError(
                f"the filter has more than {_MAX_CONDITIONS} conditions, which is more than SQLite "
                "takes. Leave some out."
            )
        if match is None or "\0" in match[0] or (match["more"] and match.end() == len(text)):
            raise ConfigError(
                f"the filter {shorten(text, _SHOWN)!r} cannot be read from "
                f"{shorten(text[at:], _SHOWN)!r} on. Write conditions like "
                "\"reward < 0.5 and status = error and metrics/tries >= 2 and task ~ 'long "
                "division'\", with = != < <= > >= ~ (contains) !~."
            )
        whole = text[match.start() : match.end("value")].strip()
        parts.append((match["name"], match["op"], match["value"], whole))
        at = match.end()
    return parts


def _condition(name: str, sign: str, word: str, has_numbers: bool = True) -> Condition:
    if sign in ("~", "!~"):
        return Condition(name, sign, word.strip("\"'"))
    value = _value(word)
    if sign not in ("=", "!=") and not (isinstance(value, int | float) and has_numbers):
        raise ConfigError(
            f"{name} {sign} {word} does not compare two numbers, so it has no meaning. Use {sign} "
            "with a number and a column of numbers, or = for texts."
        )
    return Condition(name, sign, value)


def _value(word: str) -> Any:
    if word[0] in "\"'":
        return word[1:-1]
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        # SQLite has no larger integers, so it compares floats.
        return number if abs(number) <= _MAX_INTEGER else float(word)
    return word


def matches(row: StoredRollout, where: Mapping[str, Any]) -> bool:
    """Whether a row passes filters; the same decision as that of `where_clause` in SQL."""
    for name, value in where.items():
        if name == "where":
            if value is not None and not all(each.holds(row) for each in conditions(value)):
                return False
            continue
        own = getattr(row, name)
        if isinstance(value, (list, tuple, set, frozenset)):
            if own not in value:
                return False
        elif own != value:
            return False
    return True
