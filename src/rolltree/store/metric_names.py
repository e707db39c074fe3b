"""Metrics of training steps that had another name in an older version.

A stored step keeps the names it was written with; `Run.steps` returns today's. `docs/metrics.md`
lists those.
"""

from __future__ import annotations

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
