"""Rollouts: requests, strategies, and the engine that runs them."""

from rolltree.rollouts.engine import DroppedGroup, GeneratedBatch, RolloutEngine, RolloutProgress
from rolltree.rollouts.episode import Clock, Episode, current_episode
from rolltree.rollouts.requests import (
    GroupScorer,
    GroupStrategy,
    RequestStrategy,
    RolloutSource,
    Split,
    build_requests,
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
