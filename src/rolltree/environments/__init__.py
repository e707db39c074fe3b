"""Environments: data, worlds and rewards behind one interface (spec 1).

The room knows everything below it. It knows nothing about training or evaluation, which only see a
`RolloutSource`. It leaves out agents and protocols.
"""

from rolltree.environments.dataset import Rows
from rolltree.environments.decorators import cleanup, stop, teardown
from rolltree.environments.environment import Environment
from rolltree.environments.multiturn import MultiTurnEnv, SingleTurnEnv
from rolltree.environments.registry import (
    find_environment,
    known_environments,
    load_environment,
)
from rolltree.environments.responses import ModelResponse
from rolltree.environments.results import GenerateMetadata, GenerateResults
from rolltree.environments.tool_env import ToolEnv
from rolltree.environments.tools import Tool, convert_func_to_oai_tool

__all__ = [
    "Environment",
    "GenerateMetadata",
    "GenerateResults",
    "ModelResponse",
    "MultiTurnEnv",
    "Rows",
    "SingleTurnEnv",
    "Tool",
    "ToolEnv",
    "cleanup",
    "convert_func_to_oai_tool",
    "find_environment",
    "known_environments",
    "load_environment",
    "stop",
    "teardown",
]
