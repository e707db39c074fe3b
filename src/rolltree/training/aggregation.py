"""How per-token losses become one number: a coefficient per record, the same in every scope.

Each function returns `[_R]` coefficients; the loss is `sum(coefficient * token loss)`. They are
computed over all records of an optimizer step at once, so micro-batches and ranks change nothing.
Pure numpy. It knows nothing about losses. It leaves out rows: a coefficient may depend on the
rollout and on the model call that a token belongs to, never on how samples were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolltree.errors import UnknownName, did_you_mean
from rolltree.types import Records

Coefficients: TypeAlias = NDArray[np.float32]


def _ratio(values: NDArray[np.float64], divisor: NDArray[Any] | float) -> Coefficients:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, values / divisor, 0.0).astype(np.float32)


def _mean_of_means(keys: NDArray[np.int64], weight: NDArray[np.float64]) -> Coefficients:
    _, index = np.unique(keys, axis=0, return_inverse=True)
    index = np.asarray(index).reshape(-1)
    total = np.bincount(index, weights=weight)
    divisor = total[index] * float(max(1, int((total > 0).sum())))
    return _ratio(weight, divisor)


def token_mean(records: Records, length: int) -> Coefficients:
    """Every token counts the same: `1 / number of tokens`.

    DAPO: Yu et al. 2025, arXiv:2503.14476, equation 12.
    """
    weight = records.weight.astype(np.float64)
    return _ratio(weight, float(weight.sum()))


def sequence_mean(records: Records, length: int) -> Coefficients:
    """Every model call counts the same: the mean over calls of the mean over a call's tokens.

    GRPO's `1 / |o_i|`: Shao et al. 2024, arXiv:2402.03300, equation 3, a call being an output.
    """
    keys = np.stack([records.rollout, records.call], axis=1).astype(np.int64)
    return _mean_of_means(keys, records.weight.astype(np.float64))


def rollout_mean(records: Records, length: int) -> Coefficients:
    """Every rollout counts the same: the mean over rollouts of the mean over a rollout's tokens."""
    keys = records.rollout.astype(np.int64)[:, None]
    return _mean_of_means(keys, records.weight.astype(np.float64))


def fixed_length(records: Records, length: int) -> Coefficients:
    """Divide by a constant: `1 / (number of rollouts * length)`, whatever was sampled.

    Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, section 3.2 (no `1 / |o_i|`).
    """
    weight = records.weight.astype(np.float64)
    count = len(np.unique(records.rollout[weight > 0]))
    return _ratio(weight, float(max(1, count) * length))


AGGREGATIONS: dict[str, Callable[[Records, int], Coefficients]] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "rollout": rollout_mean,
    "fixed_length": fixed_length,
}


def coefficients(records: Records, aggregation: str, length: int) -> Coefficients:
    """Return the coefficient of every record; `length` is read by `fixed_length` only.

    Raises:
        UnknownName: there is no such aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise UnknownName(
            f"there is no aggregation {aggregation!r}.{did_you_mean(aggregation, AGGREGATIONS)}"
        )
    return AGGREGATIONS[aggregation](records, length)


def rollout_sums(records: Records, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for every record, the sum of `values` over all records of its rollout."""
    _, index = np.unique(records.rollout, return_inverse=True)
    return np.asarray(np.bincount(index, weights=values)[index], np.float32)


def rollout_means(records: Records, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for every record, the mean of `values` over all records of its rollout."""
    _, index, size = np.unique(records.rollout, return_inverse=True, return_counts=True)
    return np.asarray(np.bincount(index, weights=values)[index] / size[index], np.float32)
