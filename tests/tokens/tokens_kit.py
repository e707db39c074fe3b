"""Shared by the token tests: a naive model of the tree and Hypothesis settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = os.environ.get("ROLLTREE_HYPOTHESIS") == "long"

ids = st.lists(st.integers(0, 3), max_size=6)


def examples(count: int, **extra: object) -> settings:
    """Run `count` examples, 20 times as many under ROLLTREE_HYPOTHESIS=long."""
    return settings(
        max_examples=count * (20 if LONG else 1),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **extra,  # type: ignore[arg-type]
    )


def logprobs_for(completion: list[int], seed: int = 0) -> list[float]:
    """Distinct float32 logprobs, so a shifted or swapped one is noticed."""
    values = -(np.arange(len(completion)) + 1 + 16 * seed) / 1024
    return values.astype(np.float32).tolist()


@dataclass
class NaiveCall:
    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None
    mask: list[float]
    version: int
    agent: str
    turn: int | None

    @property
    def path(self) -> list[int]:
        return self.prompt + self.completion


@dataclass
class NaiveTree:
    """Every call in full; the unique tokens are the distinct prefixes of all paths."""

    calls: list[NaiveCall] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(
            {tuple(call.path[: n + 1]) for call in self.calls for n in range(len(call.path))}
        )

    def find(self, wanted: list[int]) -> int:
        best = 0
        for call in self.calls:
            same = 0
            for a, b in zip(call.path, wanted, strict=False):
                if a != b:
                    break
                same += 1
            best = max(best, same)
        return best
