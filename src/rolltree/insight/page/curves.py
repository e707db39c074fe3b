"""The metrics of training steps as aligned series, in the order of the table of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rolltree.store import Run
from rolltree.store.metric_names import number_of
from rolltree.store.metric_table import Metric, metric_of, metric_rows

_OTHER = "Other"
_BOUNDS = {"low": ("/mean", "/low", "_low"), "high": ("/mean", "/high", "_high")}


def run_curves(run: Run) -> dict[str, Any]:
    """Return the steps and a series per metric, with None if a step has no value.

    Held-out evaluations are the series `eval/...`; their step 0 is before training.
    """
    points: dict[int, dict[str, Any]] = {}
    for done in run.evaluations():
        points.setdefault(done.step, {}).update(done.numbers)
    for row in run.steps():
        points.setdefault(row.step, {}).update(row.metrics)
    steps = sorted(points)
    names = dict.fromkeys(name for step in steps for name in points[step])
    columns = {name: [number_of(points[step].get(name)) for step in steps] for name in names}
    values = {name: column for name, column in columns.items() if set(column) != {None}}
    bounds = {bound for name in values for bound in _bounds(name, values).values()}
    order = {name: at for at, name in enumerate(metric_rows())}
    found = {
        name: metric_of(name) or Metric(name=name, section=_OTHER, meaning="") for name in values
    }
    shown = sorted(
        values.keys() - bounds,
        key=lambda name: (not found[name].label, order.get(name, len(order)), name),
    )
    return {
        "steps": steps,
        # With `name`, `label`, `unit`, `group`, `chart`, `is_first`, `is_compared`, `values`,
        # `is_points`, and `low` and `high` if the run has an interval.
        "series": [_series(found[name], values) for name in shown],
        # The curves that come first and that no step has, so that a page can say so.
        "missing": [
            {"name": each.name, "label": each.label}
            for each in metric_rows().values()
            if each.label and each.name not in values and "<" not in each.name
        ],
    }


def _series(metric: Metric, values: Mapping[str, list[float | None]]) -> dict[str, Any]:
    name = metric.name
    found = {
        **{"name": name, "label": metric.label or name, "unit": metric.unit},
        **{"group": metric.section, "chart": metric.chart, "values": values[name]},
        **{"is_first": bool(metric.label), "is_compared": metric.is_compared},
        # Measured at a few steps, with nothing known between them.
        "is_points": name.startswith("eval/"),
    }
    return found | {end: values[bound] for end, bound in _bounds(name, values).items()}


def _bounds(name: str, values: Iterable[str]) -> dict[str, str]:
    """Return the series of the interval's two ends: `reward/low`, `eval/reward_low`."""
    found = {}
    for end, (mean, inner, outer) in _BOUNDS.items():
        for bound in (name.removesuffix(mean) + inner, name + outer):
            if bound in values and bound != name:
                found[end] = bound
    return found if len(found) == 2 else {}
