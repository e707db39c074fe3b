"""AdamW over float32 master weights, its schedule, clipping, and the state a checkpoint keeps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rolltree.training.models.shards import total_norm
from rolltree.training.sections import OptimSection
from rolltree.values.errors import TrainingError


class Optimizer:
    """AdamW in place on the parameters of one module (Loshchilov and Hutter 2019, algorithm 2).

    Weight decay applies to matrices, not to vectors. Tied parameters count as one.

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
        # Drops gradients that the model may still have from a step that failed.
        self.zero_grad()

    @property
    def parameters(self) -> list[Tensor]:
        """All trained parameters, in the module's order."""
        return [p for _, p in self.named]

    def clip(self) -> float:
        """Scale the gradients down to the largest allowed norm; return the norm they had before."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norm = total_norm(gradients)
        # If the norm is not finite, the caller raises an error.
        if math.isfinite(norm) and norm > self.config.max_grad_norm:
            torch._foreach_mul_(gradients, self.config.max_grad_norm / norm)
        return norm

    def step(self, lr: float) -> None:
        """Update the parameters in place and drop the gradients; a missing one counts as zero."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        for parameter in self.parameters:
            if parameter.grad is None:
                # AdamW would skip it, so neither its moments nor its weight would decay.
                parameter.grad = torch.zeros_like(parameter)
        self._adam.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by names such as `exp_avg/<parameter>`; the tensors may be written to.

        Before the first step they are zeros, as AdamW starts.
        """
        named: dict[str, Tensor] = {}
        for name, parameter in self.named:
            state = self._adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            named |= {f"{key}/{name}": value.detach() for key, value in state.items()}
        return named
