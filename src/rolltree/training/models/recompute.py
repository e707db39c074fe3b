"""Gradient checkpointing of a model that stays in evaluation mode.

transformers recomputes layers only of a model in training mode, and that mode also switches on
dropout, layer drop and router noise, which the engine that sampled did not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rolltree.inference.local.routing import replace_forward
from rolltree.values.errors import ConfigError

_TOLERANCE = 1e-3
"""Largest difference of the probe, relative to the largest value; dropout of 1 % gives more."""


def outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the wanted modules inside a module, without those inside another wanted one."""
    modules: list[nn.Module] = []
    for child in module.children():
        modules += [child] if wanted(child) else outermost(child, wanted)
    return modules


def recomputable_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a model whose activations can be recomputed, outermost ones only."""
    return outermost(model, lambda child: isinstance(child, GradientCheckpointingLayer))


@contextmanager
def recomputation(model: Any) -> Iterator[None]:
    """Keep only the inputs of each layer for the backward pass, which must run in the context too.

    Only the layers of `model` are changed, and only while the context is open.
    """
    with ExitStack() as held:
        for layer in recomputable_layers(model):
            held.callback(replace_forward(layer, partial(_recomputed, layer.forward)))
        yield


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Reentrant checkpoints do not accept keywords, which carry layouts and experts. In evaluation
    # mode there is no random state to preserve.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def check_recomputation(
    model: Any, hidden: Callable[[], Tensor], context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Refuse a model whose gradient changes when its layers are recomputed.

    Args:
        model: its layers should be transformers' `GradientCheckpointingLayer`.
        hidden: runs the model on a few tokens and returns the last hidden states `[_S, _D]`.
        context: returns the context that the model runs in.

    Raises:
        ConfigError: there are no such layers, or a probe differs.
    """
    reason = None
    if not recomputable_layers(model):
        reason = "has no layers that transformers can recompute"
    else:
        with context():
            plain = _probe(model, hidden)
        for _ in range(2):
            with context(), recomputation(model):
                try:
                    again = _probe(model, hidden)
                except Exception as error:  # noqa: BLE001 (any failure refuses it)
                    first = str(error).partition("\n")[0]
                    reason = f"fails when it is recomputed ({type(error).__name__}: {first})"
                    break
            for ours, theirs in zip(again, plain, strict=True):
                # `not <=` instead of `>`, so that NaN is refused.
                if not float((ours - theirs).abs().max()) <= _TOLERANCE * float(theirs.abs().max()):
                    reason = "gives different results when it is recomputed"
    if reason:
        raise ConfigError(
            f"train.gradient_checkpointing is on, but {type(model).__name__} {reason}. Turn it "
            "off, and lower train.max_tokens if memory is short."
        )


@torch.enable_grad()
def _probe(model: Any, hidden: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result of `hidden`, and its squares' gradient at the input embeddings."""
    inputs = []

    def leaf(module: Any, args: Any, output: Tensor) -> Tensor:
        # At the input, so that the gradient passes through every layer, whatever is trained.
        inputs.append(output.detach().requires_grad_())
        # A copy, because a model may add to it in place.
        return inputs[-1].clone()

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    try:
        states = hidden()
        (gradient,) = torch.autograd.grad(states.float().square().sum(), inputs[:1])
    finally:
        hook.remove()
    return states.detach(), gradient
