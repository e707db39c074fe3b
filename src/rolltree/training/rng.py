"""The state of the process's random generators as named tensors, for a checkpoint.

What rolltree draws follows from seeds and has no state; an environment, a reward or a loss of the
user's may draw from Python's, numpy's or torch's global generator. It leaves out generators that
somebody made for themselves.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of `random`, `numpy.random` and torch on the CPU and every GPU."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python/words": torch.tensor(words, dtype=torch.int64),
        "python/gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy/keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy/position": torch.tensor([int(position), int(has_gauss)]),
        "numpy/gauss": torch.tensor([float(cached)], dtype=torch.float64),
        "torch/cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states = torch.cuda.get_rng_state_all()
        tensors |= {f"torch/cuda{index}": state for index, state in enumerate(states)}
    return tensors


def restore_rng(tensors: dict[str, Tensor]) -> None:
    """Set the generators to what `rng_tensors` returned; GPUs that are not here are left out."""
    gauss = tensors["python/gauss"].tolist()
    words = tuple(tensors["python/words"].tolist())
    random.setstate((3, words, gauss[0] if gauss else None))
    position, has_gauss = tensors["numpy/position"].tolist()
    keys = tensors["numpy/keys"].numpy().astype(np.uint32)
    cached = float(tensors["numpy/gauss"])
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch/cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        state = tensors.get(f"torch/cuda{index}")
        if state is not None:
            torch.cuda.set_rng_state(state, index)
