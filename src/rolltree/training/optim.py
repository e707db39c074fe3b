"""AdamW over float32 master weights, its schedule, clipping, and the state a checkpoint keeps.

It knows named parameters and nothing about losses or models. It leaves out other optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rolltree.errors import TrainingError
from rolltree.training.config import OptimSection
from rolltree.training.shard import total_norm

SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, final: 1.0,
    "linear": lambda done, final: 1 - (1 - final) * done,
    "cosine": lambda done, final: final + (1 - final) * (1 + math.cos(math.pi * done)) / 2,
}
"""(share of the run that is done, final share of the rate) -> share of the rate."""


def learning_rate(config: OptimSection, update: int, num_updates: int) -> float:
    """Return the rate of update `update` (0 is the first) of `num_updates`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    span = max(1, num_updates - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    return config.lr * SCHEDULES[config.schedule](done, config.final_lr_share)


class Optimizer:
    """AdamW in place on the parameters of one module (Loshchilov and Hutter 2019, algorithm 2).

    Matrices are decayed, vectors are not. Tied parameters are one parameter.

    Raises:
        TrainingError: a trainable parameter is not float32, or there is none.
    """

    def __init__(self, model: torch.nn.Module, config: OptimSection) -> None:
        self.config = config
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        low = [name for name, p in self.named if p.dtype not in (torch.float32, torch.float64)]
        if low or not self.named:
            what = f"{low[0]} and {len(low) - 1} more are not float32" if low else "nothing trains"
            raise TrainingError(
                f"{what}: master weights must be float32, because small updates vanish in 16 bits. "
                "Load the model with dtype 'float32'; model.compute_dtype = 'bfloat16' keeps the "
                "computation in 16 bits."
            )
        decayed = [p for _, p in self.named if p.ndim >= 2]
        others = [p for _, p in self.named if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    @property
    def parameters(self) -> list[Tensor]:
        """All trained parameters, in the module's order."""
        return [p for _, p in self.named]

    def clip(self) -> float:
        """Scale the gradients to the largest norm allowed and return the norm they had."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norm = total_norm(gradients)
        if math.isfinite(norm) and norm > self.config.max_grad_norm:
            torch._foreach_mul_(gradients, self.config.max_grad_norm / norm)
        return norm

    def step(self, lr: float) -> None:
        """Update the parameters in place and drop the gradients; a missing one counts as zero."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._adam.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state as named tensors: `exp_avg/<parameter>` and so on."""
        for name, parameter in self.named:
            for key, value in self._adam.state.get(parameter, {}).items():
                yield f"{key}/{name}", value

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the state that `tensors()` gave.

        Raises:
            TrainingError: it belongs to other parameters.
        """
        shapes = {name: p.shape for name, p in self.named}
        state: dict[Tensor, dict[str, Any]] = {p: {} for _, p in self.named}
        by_name = dict(self.named)
        for full_name, value in tensors.items():
            key, _, name = full_name.partition("/")
            if name not in shapes or (key != "step" and value.shape != shapes[name]):
                raise TrainingError(
                    f"the checkpoint's optimizer state has {full_name} of shape "
                    f"{list(value.shape)}, which this model does not. It was saved for another "
                    "model: use the model it was saved with."
                )
            parameter = by_name[name]
            state[parameter][key] = value if key == "step" else value.to(parameter.device)
        self._adam.state.clear()
        self._adam.state.update({p: values for p, values in state.items() if values})
