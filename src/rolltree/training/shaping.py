"""What is taken off an episode's reward before credit: a penalty for length.

Pure. The stored reward stays what the environment gave; only advantages see the penalty. It leaves
out shaping by anything but length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolltree.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SoftOverlong:
    """DAPO's soft over-long punishment: Yu et al. 2025, arXiv:2503.14476, equation 13.

    Args:
        max_tokens: from here on the penalty is 1, L_max in the paper.
        buffer: over how many tokens before it the penalty grows from 0, L_cache in the paper.

    Raises:
        ConfigError: a buffer that is not inside the limit.

    >>> [SoftOverlong(100, 20).penalty(n) for n in (80, 85, 100, 101)]
    [0.0, 0.25, 1.0, 1.0]
    """

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer is {self.buffer} and algorithm.overlong_tokens is "
                f"{self.max_tokens}; the buffer must be at least 1 and at most overlong_tokens, "
                "because the penalty grows over the buffer's tokens and is full at the limit."
            )

    def penalty(self, num_tokens: int) -> float:
        """Return what is subtracted for a rollout that sampled `num_tokens` in all its calls."""
        beyond = num_tokens - (self.max_tokens - self.buffer)
        return min(1.0, max(0.0, beyond / self.buffer))

    def of(self, state: Mapping[str, Any]) -> float:
        """Return the penalty of a rollout's state."""
        steps = state.get("trajectory") or ()
        counts = ((step.get("extras") or {}).get("num_completion_tokens") for step in steps)
        return self.penalty(sum(int(count or 0) for count in counts))
