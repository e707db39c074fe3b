"""Where in a rollout trainer and engine disagree: by position in the completion, and by call.

A wrong temperature shows everywhere, a wrong first token or a cut stop string at one position, a
template or cache that goes wrong in later turns at later calls. Pure numpy. It knows records. It
leaves out what the difference is of.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rolltree.types import IntArray, Records

_OFFSETS = (0, 1, 4, 16, 64, 256, 1024)
_CALLS = (0, 1, 2, 4, 8, 16)
"""Lower bounds of the ranges; the last one is open."""


def by_place(records: Records, difference: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean absolute difference per range of positions and of calls.

    Example: `{"mismatch/at_0": ..., "mismatch/at_1-3": ..., "mismatch/call_0": ...,
    "mismatch/call_16+": ...}`; a range without tokens is not there.

    Args:
        records: `_R` loss records.
        difference: float64 `[_R]`, trainer minus engine logprob.
    """
    size = np.abs(difference)
    return {
        **_per_range("mismatch/at", records.offset, _OFFSETS, size),
        **_per_range("mismatch/call", records.call, _CALLS, size),
    }


def _per_range(
    stem: str, values: IntArray, bounds: tuple[int, ...], size: NDArray[np.float64]
) -> dict[str, float]:
    place = np.searchsorted(bounds, values, side="right") - 1
    count = np.bincount(place, minlength=len(bounds))
    total = np.bincount(place, weights=size, minlength=len(bounds))
    names = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(bounds)]
    names.append(f"{bounds[-1]}+")
    return {
        f"{stem}_{name}": float(total[i] / count[i]) for i, name in enumerate(names) if count[i]
    }
