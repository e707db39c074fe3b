"""Rollouts: requests, strategies, and the engine that runs them.

Names are loaded on first use (PEP 562): who only reads stored rollouts (`rollouts.record`) loads
neither the engine nor the clients of models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "rolltree.rollouts.engine": "DroppedGroup GeneratedBatch RolloutEngine RolloutProgress",
    "rolltree.rollouts.requests": "Clock Episode GroupScorer GroupStrategy RequestStrategy "
    "RolloutSource Split build_requests current_episode example_request group_member merge_args "
    "repeat resolve_sampling",
    "rolltree.seeds": "derive_seed",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

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


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'rolltree.rollouts' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
