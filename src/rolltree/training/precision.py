"""Cheaper matrix products for the backward pass, while the forward pass stays exact.

The forward pass gives the logprobs that are compared with the engine's, so it stays float32. Two
thirds of the work are gradients, which tolerate rounding: with `bfloat16`, oneDNN multiplies
float32 matrices in bfloat16 and adds up in float32; on a CPU with AMX that is faster, and gradients
stay within 1e-2 (benchmarks/tree_training.py). A CPU without it computes in float32 as before. It
knows torch's switch for it, and leaves out other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def backward_precision(dtype: str) -> Iterator[None]:
    """Let float32 matrix products on the CPU run in `dtype` while the context is open.

    The switch is the process's: nothing else may multiply meanwhile, so the engine is paused.
    """
    if dtype == "float32":
        yield
        return
    switch: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (untyped in torch)
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
