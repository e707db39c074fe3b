"""A plain copy of the trained weights, for what cannot read them where they are.

The embedded engine reads the trainer's own tensors. With several ranks those are shards, and with
adapters they are not the weights to sample from: then it reads this copy, which is brought up to
date at every publish. It knows modules. It leaves out servers in other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from rolltree.training.lora import plain_tensors


@torch.no_grad()
def copy_weights(model: Any, served: Any | None) -> None:
    """Write the weights of `model`, merged and gathered, into the plain module `served`.

    Every rank calls it; those without a copy pass None.
    """
    targets = {}
    if served is not None:
        targets = {**dict(served.named_parameters()), **dict(served.named_buffers())}
    for name, value in plain_tensors(model):
        if served is not None:
            targets[name].copy_(value)


class CopyTarget:
    """A weight target whose engine serves a copy: `publish` renews the copy first.

    Args:
        engine: serves the copy; everything else is asked of it.
        renew: brings the copy up to date.
    """

    def __init__(self, engine: Any, renew: Callable[[], None]) -> None:
        self.engine, self._renew = engine, renew

    @property
    def version(self) -> int:
        """The policy version that the engine samples with."""
        version: int = self.engine.version
        return version

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which nothing is sampled."""
        context: AbstractAsyncContextManager[None] = self.engine.paused()
        return context

    def publish(self, version: int) -> None:
        """Copy the weights and say that they are those of `version`."""
        self._renew()
        self.engine.publish(version)
