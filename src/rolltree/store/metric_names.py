"""Flat names of stored metrics, as `docs/metrics.md` lists them.

A step keeps the names it was written with; `Run.steps` returns today's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

OLD_NAMES = {
    "credit/flat_group_share": "train/frac_reward_zero_std",
    "error/share": "error/mean",
    "mismatch/abs_max": "train/sampling/sampling_logp_difference/max",
    "mismatch/abs_mean": "train/sampling/sampling_logp_difference/mean",
    "mismatch/k3": "mismatch_kl/mean",
    "rollout/sampled_tokens": "train/completions/mean_length",
    "rollout/truncated_share": "is_truncated/mean",
    "time/rollout_s": "time/wait_for_batch",
    "time/step_s": "time/step",
    "train/clip_share": "train/clip_ratio/region_mean",
    "train/lr": "train/learning_rate",
    "train/num_tokens": "train/num_computed_tokens",
}
"""Old name -> new name. A new name is never an old one of something else."""
OLD_STEMS = {"metric/": "metrics/", "samples/break_rate/": "samples/breaks/"}
"""The same for the beginnings of names."""


def renamed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics under the names of today.

    >>> renamed({"time/step_s": 1.5, "metric/exact": 0.5, "reward/mean": 0.5})
    {'time/step': 1.5, 'metrics/exact': 0.5, 'reward/mean': 0.5}
    """
    return {_renamed(name): value for name, value in metrics.items()}


def _renamed(name: str) -> str:
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    for old, new in OLD_STEMS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


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
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[key] = float(value)
    return flat


def eval_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation: one curve per name over all evaluations of a run.

    An estimate's mean has the name of what is estimated, its interval the ending `_low` or `_high`.

    >>> eval_numbers({"reward": {"mean": 0.5, "low": 0.25}, "pass_at": {"4": {"mean": 0.75}}})
    {'eval/reward': 0.5, 'eval/reward_low': 0.25, 'eval/pass@4': 0.75}
    """
    flat = numbers(metrics, "eval")
    found = {}
    for name, value in flat.items():
        stem, _, last = name.rpartition("/")
        if f"{stem}/mean" in flat:
            if last not in _OF_ESTIMATES:
                continue
            name = stem + _OF_ESTIMATES[last]
        if name not in _SETTINGS:
            found[name.replace("eval/pass_at/", "eval/pass@")] = value
    return found


_OF_ESTIMATES = {"mean": "", "low": "_low", "high": "_high"}
_SETTINGS = ("eval/confidence", "eval/pass_threshold")
