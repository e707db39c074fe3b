"""What a model computes in float64, even if its modules force float32 inside.

Between two roundings of one number lies a router's or an indexer's choice: `Double` notes how near
the nearest one was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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


EPS = 2.0**-24
"""Float32 rounds a number by at most this share of it."""
ROUNDED = 2.0**13 * EPS
"""Bound on the relative error of a gradient in float32: some thousand roundings on the way of each
number through the layers and back, if all went the same way. What breaks a law is 1e-2 and more."""


@torch.no_grad()
def float32_allows(
    exact: Any, calls: Sequence[tuple[Any, Any]], temperature: float = 1.0, num_draws: int = 4
) -> list[Tensor]:
    """Return, for each (prompt, completion), how far float32 may be off in each logprob `[_C]`.

    Arithmetic that rounds gives about what exact arithmetic gives of slightly other weights (Higham
    2002, section 1.5). So the bound is 32 times the largest change of a logprob of `exact`, in
    float64, by weights that are off by a few units of float32's last place at random, and the
    rounding of logits of about 40. It is large where a logprob is ill-conditioned, however near to
    float64 one pass happens to come. (Engine and plain pass come to 1/100 of it at the median and
    mostly to 1/30 at most; Qwen3-Next's triangular inverse to 1/4.)
    """
    generator = torch.Generator().manual_seed(0)
    found = [call_logprobs(exact, *call, temperature) for call in calls]
    moved = [torch.zeros_like(logprobs) for logprobs in found]
    for _ in range(num_draws):
        near = copy.deepcopy(exact)
        for weight in near.parameters():
            weight *= 1 + 4 * EPS * torch.randn(weight.shape, generator=generator)
        for at, call in enumerate(calls):
            away = (call_logprobs(near, *call, temperature) - found[at]).abs()
            moved[at] = torch.maximum(moved[at], away)
    return [
        32 * one + 8 * EPS * (40 + logprobs.abs())
        for one, logprobs in zip(moved, found, strict=True)
    ]
