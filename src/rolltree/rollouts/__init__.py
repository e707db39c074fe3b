"""Rollouts: requests, strategies, and the engine that runs them.

Names are loaded on first use (PEP 562), so that reading stored rollouts (`rollouts.decode`)
imports neither the engine nor the model clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader

if TYPE_CHECKING:
    from rolltree.rollouts.batch import DroppedGroup as DroppedGroup
    from rolltree.rollouts.batch import GeneratedBatch as GeneratedBatch
    from rolltree.rollouts.engine import RolloutEngine as RolloutEngine
    from rolltree.rollouts.engine import RolloutProgress as RolloutProgress
    from rolltree.rollouts.requests import Clock as Clock
    from rolltree.rollouts.requests import Episode as Episode
    from rolltree.rollouts.requests import GroupScorer as GroupScorer
    from rolltree.rollouts.requests import GroupStrategy as GroupStrategy
    from rolltree.rollouts.requests import RequestStrategy as RequestStrategy
    from rolltree.rollouts.requests import RolloutSource as RolloutSource
    from rolltree.rollouts.requests import Split as Split
    from rolltree.rollouts.requests import build_requests as build_requests
    from rolltree.rollouts.requests import current_episode as current_episode
    from rolltree.rollouts.requests import example_request as example_request
    from rolltree.rollouts.requests import group_member as group_member
    from rolltree.rollouts.requests import merge_args as merge_args
    from rolltree.rollouts.requests import repeat as repeat
    from rolltree.rollouts.requests import resolve_sampling as resolve_sampling
    from rolltree.values.seeds import derive_seed as derive_seed

_MODULES = {
    "batch": "DroppedGroup GeneratedBatch",
    "engine": "RolloutEngine RolloutProgress",
    "requests": "Clock Episode GroupScorer GroupStrategy RequestStrategy RolloutSource Split "
    "build_requests current_episode derive_seed example_request group_member merge_args repeat "
    "resolve_sampling",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)
