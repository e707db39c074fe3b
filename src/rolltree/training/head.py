"""Computes logits from last hidden states exactly as the model's own forward pass does.

Models cap their logits, scale them or the hidden states, or cut off padding, and one configuration
key means different things in different models (`logits_scaling` multiplies, divides, or divides the
hidden states). So nothing is read from the configuration: the model's own `forward` runs, over a
stand-in for its body that returns the hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolltree.inference.local.shell import body_name, body_of
from rolltree.values.errors import TrainingError

LARGE_LOGIT = 200.0
"""The probe scales logits to this: several times the largest cap of any known model."""


class _Output:
    """The output of a model's body: last hidden states, and None for every other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        # Returning None for a dunder name would claim that the protocol is supported.
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class _Body:
    """Stands in for a model's body, and has its attributes."""

    def __init__(self, body: Any, hidden: Tensor) -> None:
        self._body, self._hidden = body, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return self if name == _INNER else getattr(self._body, name)


_INNER = "decoder"
"""The attribute of a body that some models call directly, instead of the body."""


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits `[_S, _V]` that `model` computes from last hidden states `[_S, _D]`.

    Caps, scales and biases are applied as the model's `forward` does. `model` is not changed, so
    another thread may use it meanwhile.
    """
    body = _Body(body_of(model), hidden[None])
    # Copied by hand, because sharded modules do not support `copy`.
    own = object.__new__(type(model))
    own.__dict__ = {
        **model.__dict__,
        "_modules": {**model._modules, body_name(model): body},
    }
    # The stand-in ignores them, but `forward` needs ids of some kind.
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    # The class's `forward`, which runs no hooks of the module.
    logits: Tensor = type(own).forward(own, input_ids=ids).logits
    return logits[0]


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose logits, small or large, `head_logits` does not reproduce.

    Raises:
        TrainingError: with the reason.
    """
    try:
        reason = _probe(model)
    except Exception as error:  # noqa: BLE001  (a model is a program, and this one is unknown)
        reason = f"asking it for the logits of hidden states fails with {error!r}"
    if reason:
        raise TrainingError(
            f"{type(model).__name__} cannot be trained: {reason}. The logprobs of the trainer "
            "would not be the engine's. Models whose forward pass in transformers makes the "
            "logits from the body's last hidden states can be trained."
        )


def _probe(model: Any) -> str | None:
    """Scale the last hidden states inside the whole model, and compare its logits with ours."""
    body = body_of(model)
    if body is model:
        return "it has no body apart from its output head"
    ids = torch.tensor([[3, 1, 2]], device=model.get_input_embeddings().weight.device)
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0]
    factor = 1.0

    def scale(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    hook = getattr(body, _INNER, body).register_forward_hook(scale)
    try:
        # First with hidden states as they are, then scaled up until a cap shows.
        for number in range(2):
            whole = model(input_ids=ids, use_cache=False).logits[0].float()
            # In reverse order, so that a head which mixed its rows would give other logits.
            ours = head_logits(model, factor * hidden.flip(0)).flip(0).float()
            size = float(whole.abs().max())
            if whole.shape != ours.shape or not torch.allclose(
                whole, ours, rtol=1e-3, atol=1e-3 * size
            ):
                return (
                    "it does more to its logits than its output head says"
                    f"{' once they are large' if number else ''}"
                )
            factor = LARGE_LOGIT / max(size, 1e-6)
    finally:
        hook.remove()
    return None
