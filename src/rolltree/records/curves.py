"""The metrics of training steps as aligned series, under the names of `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rolltree.records.values import number_of
from rolltree.store import Run

CURVES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Reward": {
        "reward/mean": ("reward in training", ""),
        "eval/reward": ("reward, held out", ""),
        "train/frac_reward_zero_std": ("groups without variance", "share"),
        "reward/std": ("spread of rewards", ""),
    },
    "Policy": {
        "train/entropy": ("entropy", "nats"),
        "train/kl": ("KL to the reference", "nats"),
        "train/clip_ratio/region_mean": ("clipped tokens", "share"),
        "train/grad_norm": ("gradient norm", ""),
        "train/loss": ("loss", ""),
        "train/learning_rate": ("learning rate", ""),
    },
    "Engine against trainer": {
        "train/sampling/sampling_logp_difference/mean": ("size of trainer - engine", "nats"),
        "mismatch/mean": ("trainer - engine logprob", "nats"),
        "mismatch_kl/mean": ("KL of engine and trainer", "nats"),
        "train/lag_mean": ("staleness", "versions"),
        "async/stale_share": ("tokens too old to train", "share"),
        "ratio/ess": ("effective sample size", "share"),
    },
    "Rollouts": {
        "train/completions/mean_length": ("sampled tokens per rollout", "tokens"),
        "rollout/num_calls": ("calls per rollout", ""),
        "is_truncated/mean": ("truncated", "share"),
        "rollout/length_cut_share": ("calls that hit their token limit", "share"),
        "error/mean": ("failed", "share"),
        "samples/break_rate": ("breaks per later call", "share"),
        "samples/reuse_factor": ("reuse factor", "x"),
    },
    "Speed": {
        "rollout/tokens_per_s": ("sampled tokens", "tokens/s"),
        "train/tokens_per_s": ("trained tokens", "tokens/s"),
        "time/step": ("whole step", "s"),
        "time/wait_for_batch": ("waiting for rollouts", "s"),
        "time/train_s": ("training", "s"),
        "memory/peak_rss_bytes": ("most memory", "bytes"),
    },
}
"""Labels and units of the curves that come first, by group and metric; others follow by name."""
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
    told = {name: (group, *said) for group, rows in CURVES.items() for name, said in rows.items()}
    order = {name: at for at, name in enumerate(told)}
    shown = sorted(values.keys() - bounds, key=lambda name: (order.get(name, len(order)), name))
    return {
        "steps": steps,
        # With `name`, `label`, `unit`, `group`, `values`, `is_points`, and `low` and `high` if the
        # run has an interval.
        "series": [_series(name, values, told) for name in shown],
        # The metrics of `CURVES` that no step has, so that a page can say so.
        "missing": [
            {"name": name, "label": label}
            for name, (_, label, _) in told.items()
            if name not in values
        ],
    }


def _series(
    name: str, values: Mapping[str, list[float | None]], told: Mapping[str, tuple[str, str, str]]
) -> dict[str, Any]:
    group, label, unit = told.get(name, (_group(name), name, ""))
    found = {
        **{"name": name, "label": label, "unit": unit, "group": group, "values": values[name]},
        # Measured at a few steps, with nothing known between them.
        "is_points": name.startswith("eval/"),
    }
    return found | {end: values[bound] for end, bound in _bounds(name, values).items()}


def _group(name: str) -> str:
    if name.startswith("metrics/"):
        return "Metrics of the environment"
    return "Held-out evaluations" if name.startswith("eval/") else "Other"


def _bounds(name: str, values: Iterable[str]) -> dict[str, str]:
    """Return the series of the interval's two ends: `reward/low`, `eval/reward_low`."""
    found = {}
    for end, (mean, inner, outer) in _BOUNDS.items():
        for bound in (name.removesuffix(mean) + inner, name + outer):
            if bound in values and bound != name:
                found[end] = bound
    return found if len(found) == 2 else {}
