"""Environments: data, worlds and rewards behind one interface."""

from rolltree.environments.batch_runner import GenerateMetadata, GenerateResults
from rolltree.environments.code import changed_code
from rolltree.environments.dataset import Rows
from rolltree.environments.env_group import EnvGroup
from rolltree.environments.environment import Environment
from rolltree.environments.harbor_env import HarborEnv
from rolltree.environments.lifecycle import cleanup, stop, teardown
from rolltree.environments.mcp_env import MCPEnv, MCPServer
from rolltree.environments.multiturn import MultiTurnEnv, SingleTurnEnv
from rolltree.environments.project import eval_defaults, own_max_tokens, train_config_file
from rolltree.environments.protocol_env import ProtocolEnvironment
from rolltree.environments.reasoning_gym_env import ReasoningGymEnv
from rolltree.environments.registry import (
    find_environment,
    known_environments,
    load_environment,
    load_object,
)
from rolltree.environments.sandbox_env import PythonEnv, SandboxEnv
from rolltree.environments.scoring import score_episode
from rolltree.environments.tool_env import StatefulToolEnv, ToolEnv
from rolltree.environments.worlds import GymEnv, OpenEnv, TextArenaEnv, WorldEnv
from rolltree.tools import Tool, ToolUnavailable, convert_func_to_oai_tool

__all__ = [
    "EnvGroup",
    "Environment",
    "GenerateMetadata",
    "GenerateResults",
    "GymEnv",
    "HarborEnv",
    "MCPEnv",
    "MCPServer",
    "MultiTurnEnv",
    "OpenEnv",
    "ReasoningGymEnv",
    "ProtocolEnvironment",
    "PythonEnv",
    "Rows",
    "SandboxEnv",
    "SingleTurnEnv",
    "StatefulToolEnv",
    "TextArenaEnv",
    "Tool",
    "ToolEnv",
    "ToolUnavailable",
    "WorldEnv",
    "changed_code",
    "cleanup",
    "convert_func_to_oai_tool",
    "eval_defaults",
    "find_environment",
    "known_environments",
    "load_environment",
    "load_object",
    "own_max_tokens",
    "score_episode",
    "stop",
    "teardown",
    "train_config_file",
]
