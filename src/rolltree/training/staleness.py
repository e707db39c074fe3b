"""How old each token is in policy versions, and which ones are too old to train.

The lag of a token is the version of the weights before the step minus the version that sampled it.
It is defined per token, because weights may change during a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rolltree.samples.resolve import resolve_tokens
from rolltree.training.config import TrainConfig
from rolltree.types import RolloutResult, Sample


def staleness_limit(config: TrainConfig) -> int:
    """Return the largest lag at which a token is trained: `max_lag`, or `async_steps`."""
    section = config.train
    return section.async_steps if section.max_lag is None else section.max_lag


def mask_stale(
    samples: Sequence[Sample], version: int, max_lag: int
) -> tuple[list[Sample], dict[str, float]]:
    """Give tokens older than `max_lag` weight 0, as if they were context.

    Args:
        samples: what a step trains on.
        version: of the weights before the step.
        max_lag: the largest lag that is trained.

    Returns:
        The samples, and metrics over their trainable tokens: `async/lag_max`, `async/stale_share`
        and `async/num_stale_tokens`.
    """
    masked = []
    num_tokens = num_stale = largest = 0
    for sample in samples:
        records = sample.records
        lag, counts = version - records.version, records.weight != 0
        stale = counts & (lag > max_lag)
        num_tokens += int(counts.sum())
        num_stale += int(stale.sum())
        largest = max(largest, int(lag[counts].max(initial=0)))
        if stale.any():
            weight = np.where(stale, np.float32(0), records.weight)
            sample = replace(sample, records=replace(records, weight=weight))
        masked.append(sample)
    return masked, {
        "async/lag_max": float(largest),
        "async/stale_share": num_stale / max(1, num_tokens),
        "async/num_stale_tokens": float(num_stale),
    }


def newest_version(results: Sequence[RolloutResult]) -> int | None:
    """Return the highest version that sampled a token of `results`; None without any."""
    newest = None
    for result in results:
        for state in result.states:
            tree, handles = resolve_tokens(0, state["trajectory"])
            for handle in handles:
                versions = tree.versions(handle) if handle >= 0 else ()
                if len(versions):
                    newest = max(int(np.max(versions)), -1 if newest is None else newest)
    return newest
