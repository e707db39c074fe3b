"""What a model computes in float64, also where its modules force float32 inside.

Between two roundings of one number lies a router's or an indexer's choice: `Double` notes how near
the nearest one was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOW = (torch.float32, torch.bfloat16, torch.float16)
TOPK = (torch.topk, Tensor.topk)


class Double(TorchFunctionMode):
    """While it is open, whatever asks for float32 gets float64.

    `margin` is the smallest gap between the last value that a `topk` took and the first that it
    left, relative to the size of the values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            func = Tensor.double
        if func is not Tensor.view:
            args = tuple(_doubled(value) for value in args)
            kwargs = {key: _doubled(value) for key, value in kwargs.items()}
        if func in TOPK:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _note(self, values: Tensor, k: int, dim: int = -1, **rest: Any) -> None:
        ordered = values.detach().movedim(dim, -1).sort(-1, descending=True).values
        if not 0 < k < ordered.shape[-1] or not values.is_floating_point():
            return
        gap = ordered[..., k - 1] - ordered[..., k]
        size = torch.where(ordered.abs() < 1e30, ordered.abs(), 0).amax(-1)
        near = (gap / size.clamp_min(1e-30))[ordered[..., k] > -1e30]
        if len(near):
            self.margin = min(self.margin, float(near.min()))


def _doubled(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def double(model: Any) -> Any:
    """Return a copy of `model` in float64."""
    made = copy.deepcopy(model).double().eval()
    for module in made.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # the others have no float64
    return made


@contextmanager
def in_double() -> Iterator[Double]:
    """Compute in float64 whatever a module asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


def call_logprobs(model: Any, prompt: Any, completion: Any, temperature: float) -> Tensor:
    """Return the logprobs `[_C]` of a completion in one plain forward pass over one call."""
    ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    scored = (logits / temperature).log_softmax(-1)
    return scored.gather(-1, ids[0, len(prompt) :, None])[:, 0]
