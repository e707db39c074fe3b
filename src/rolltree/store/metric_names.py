"""Flat names of stored metrics, as `docs/metrics.md` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def numbers(data: Mapping[str, Any], stem: str = "") -> dict[str, float]:
    """Return the finite numbers of nested metrics under flat names.

    >>> numbers({"reward": {"mean": 0.5, "unit": "share"}, "num_failed": 0}, "eval")
    {'eval/reward/mean': 0.5, 'eval/num_failed': 0.0}
    """
    flat: dict[str, float] = {}
    for name, value in data.items():
        key = f"{stem}/{name}" if stem else str(name)
        if isinstance(value, Mapping):
            flat |= numbers(value, key)
        elif (number := number_of(value)) is not None:
            flat[key] = number
    return flat


def eval_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation; each name is a curve over the evaluations of a run.

    An estimate's mean has the name of its quantity; its bounds also end with `_low` and `_high`.

    >>> eval_numbers({"reward": {"mean": 0.5, "low": 0.25}, "pass_at": {"4": {"mean": 0.75}}})
    {'eval/reward': 0.5, 'eval/reward_low': 0.25, 'eval/pass@4': 0.75}
    """
    flat = numbers(metrics, "eval")
    named = {}
    for name, value in flat.items():
        stem, _, last = name.rpartition("/")
        if f"{stem}/mean" in flat:
            if last not in _OF_ESTIMATES:
                continue
            name = stem + _OF_ESTIMATES[last]
        if name not in _SETTINGS:
            named[name.replace("eval/pass_at/", "eval/pass@")] = value
    return named


_OF_ESTIMATES = {"mean": "", "low": "_low", "high": "_high"}
_SETTINGS = ("eval/confidence", "eval/pass_threshold")


def is_number(value: Any) -> bool:
    """Whether a value is a number; True and False count as numbers."""
    return isinstance(value, bool | int | float)


def number_of(value: Any) -> float | None:
    """Return a value as a finite float; None if it is not a finite number."""
    if not is_number(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    # Neither NaN nor an infinity minus itself is 0.
    return number if number - number == 0.0 else None


def finite_numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the values that are finite numbers, by their names."""
    known = {str(name): number_of(value) for name, value in values.items()}
    return {name: value for name, value in known.items() if value is not None}
