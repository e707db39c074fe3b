"""What one token's keys and values look like: all that is needed of a model to keep them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys and values look like in every layer of a model."""

    num_layers: int
    num_heads: int  # key/value heads
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Memory of one cached token over all layers."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize
