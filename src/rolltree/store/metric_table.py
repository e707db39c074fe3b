"""The table of metrics: `metric_table.toml`, a row each, with all that is said of one anywhere.

`docs/metrics.md`, the audit's bounds, the page's curves, the live table and the story are made from
these rows: a new metric needs what computes it, and a row.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_FILE = Path(__file__).with_suffix(".toml")
_FREE = ("", "nats")
"""Units of numbers that may be negative; all others are at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric, or those whose names differ in a part, which is written `<part>`.

    Attributes:
        name: the name under which steps or evaluations have it.
        section: where pages show it.
        meaning: what it is, in Markdown.
        elsewhere: the names of other libraries, in Markdown.
        unit: "" for numbers without one, such as rewards; a "share" is from 0 to 1.
        least, most: its bounds; None: those of the unit.
        label: the title of its curve. Curves with a label come first.
        chart: the title of a chart that it shares with others.
        is_compared: runs that are compared are drawn in one chart.
        heading, form, rank: its column in live tables; from a narrow terminal the column with the
            largest rank goes first.
        cause: its name where the story tells what changed when the reward did.
    """

    name: str
    section: str
    meaning: str
    elsewhere: str = ""
    unit: str = ""
    least: float | None = None
    most: float | None = None
    label: str = ""
    chart: str = ""
    is_compared: bool = False
    heading: str = ""
    form: str = ""
    rank: int = 0
    cause: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest value that it can have."""
        least = -math.inf if self.unit in _FREE else 0.0
        most = 1.0 if self.unit == "share" else math.inf
        return least if self.least is None else self.least, most if self.most is None else self.most


@functools.cache
def metric_rows() -> Mapping[str, Metric]:
    """Return the metrics by name, those of one section together, in the order of the pages."""
    return {
        name: Metric(name=name, section=section, **row)
        for section, rows in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
        for names, row in rows.items()
        for name in names.split()
    }


@functools.lru_cache(maxsize=4096)
def metric_of(name: str) -> Metric | None:
    """Return the metric that a name means, None if no row has it.

    >>> metric_of("env/math/reward/mean").label
    'reward of math in training'
    """
    if name in metric_rows():
        return metric_rows()[name]
    for pattern, metric in _patterns():
        if match := pattern.fullmatch(name):
            label, chart = metric.label, metric.chart
            for part, value in match.groupdict().items():
                label, chart = (text.replace(f"<{part}>", value) for text in (label, chart))
            return replace(metric, name=name, label=label, chart=chart)
    return None


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    # The longest first: `eval/env/<env>/metrics/<name>_low` also looks like one without `_low`.
    rows = sorted((m for m in metric_rows().values() if "<" in m.name), key=lambda m: -len(m.name))
    # Parts may contain a slash: an environment in a group of a group is `group/name`.
    parts = [re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(metric.name)) for metric in rows]
    return [(re.compile(part, re.DOTALL), metric) for part, metric in zip(parts, rows, strict=True)]
