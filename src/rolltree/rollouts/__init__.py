"""Rollouts: requests, strategies, and the engine that runs them.

Names are loaded on first use (PEP 562): who only reads stored rollouts (`rollouts.decode`) loads
neither the engine nor the clients of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree.lazy import loader

if TYPE_CHECKING:
    from rolltree.rollouts.engine import (
        DroppedGroup,
        GeneratedBatch,
        RolloutEngine,
        RolloutProgress,
    )
    from rolltree.rollouts.requests import (
        Clock,
        Episode,
        GroupScorer,
        GroupStrategy,
        RequestStrategy,
        RolloutSource,
        Split,
        build_requests,
        current_episode,
        example_request,
        group_member,
        merge_args,
        repeat,
        resolve_sampling,
    )
    from rolltree.seeds import derive_seed

_MODULES = {
    "engine": "DroppedGroup GeneratedBatch RolloutEngine RolloutProgress",
    "requests": "Clock Episode GroupScorer GroupStrategy RequestStrategy RolloutSource Split "
    "build_requests current_episode derive_seed example_request group_member merge_args repeat "
    "resolve_sampling",
}

__all__ = [
    "Clock",
    "DroppedGroup",
    "Episode",
    "GeneratedBatch",
    "GroupScorer",
    "GroupStrategy",
    "RolloutProgress",
    "RequestStrategy",
    "RolloutEngine",
    "RolloutSource",
    "Split",
    "build_requests",
    "current_episode",
    "derive_seed",
    "example_request",
    "group_member",
    "merge_args",
    "repeat",
    "resolve_sampling",
]
__getattr__ = loader(__name__, _MODULES)
