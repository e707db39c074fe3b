"""Rollouts: requests, strategies, and the engine that runs them."""

from rolltree.rollouts.engine import DroppedGroup, GeneratedBatch, RolloutEngine, RolloutProgress
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
