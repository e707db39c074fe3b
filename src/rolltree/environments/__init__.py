"""Environments: data, worlds and rewards behind one interface.

Names are loaded on first use (PEP 562): parsers and tools need no environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.wings import exports

if TYPE_CHECKING:
    from rolltree.agents.mcp_env import MCPEnv as MCPEnv
    from rolltree.agents.mcp_env import MCPServer as MCPServer
    from rolltree.agents.protocol_env import ProtocolEnvironment as ProtocolEnvironment
    from rolltree.agents.reasoning_gym_env import ReasoningGymEnv as ReasoningGymEnv
    from rolltree.agents.world_env import GymEnv as GymEnv
    from rolltree.agents.world_env import OpenEnv as OpenEnv
    from rolltree.agents.world_env import TextArenaEnv as TextArenaEnv
    from rolltree.agents.world_env import WorldEnv as WorldEnv
    from rolltree.environments.code_hashes import changed_code as changed_code
    from rolltree.environments.dataset import Rows as Rows
    from rolltree.environments.env_group import EnvGroup as EnvGroup
    from rolltree.environments.environment import Environment as Environment
    from rolltree.environments.generate import GenerateMetadata as GenerateMetadata
    from rolltree.environments.generate import GenerateResults as GenerateResults
    from rolltree.environments.lifecycle import cleanup as cleanup
    from rolltree.environments.lifecycle import stop as stop
    from rolltree.environments.lifecycle import teardown as teardown
    from rolltree.environments.multiturn import MultiTurnEnv as MultiTurnEnv
    from rolltree.environments.multiturn import SingleTurnEnv as SingleTurnEnv
    from rolltree.environments.project import eval_defaults as eval_defaults
    from rolltree.environments.project import own_max_tokens as own_max_tokens
    from rolltree.environments.project import train_config_file as train_config_file
    from rolltree.environments.registry import find_environment as find_environment
    from rolltree.environments.registry import known_environments as known_environments
    from rolltree.environments.registry import load_environment as load_environment
    from rolltree.environments.registry import load_object as load_object
    from rolltree.environments.scoring import score_episode as score_episode
    from rolltree.environments.tool_env import StatefulToolEnv as StatefulToolEnv
    from rolltree.environments.tool_env import ToolEnv as ToolEnv
    from rolltree.environments.tools import Tool as Tool
    from rolltree.environments.tools import ToolUnavailable as ToolUnavailable
    from rolltree.environments.tools import convert_func_to_oai_tool as convert_func_to_oai_tool
    from rolltree.sandbox.harbor_env import HarborEnv as HarborEnv
    from rolltree.sandbox.sandbox_env import PythonEnv as PythonEnv
    from rolltree.sandbox.sandbox_env import SandboxEnv as SandboxEnv

_MODULES = {
    **exports(__name__),
    "generate": "GenerateMetadata GenerateResults",
    "code_hashes": "changed_code",
    "dataset": "Rows",
    "environment": "Environment",
    "lifecycle": "cleanup stop teardown",
    "multiturn": "MultiTurnEnv SingleTurnEnv",
    "scoring": "score_episode",
    "env_group": "EnvGroup",
    "project": "eval_defaults own_max_tokens train_config_file",
    "registry": "find_environment known_environments load_environment load_object",
    "tool_env": "StatefulToolEnv ToolEnv",
    "rolltree.environments.tools": "Tool ToolUnavailable convert_func_to_oai_tool",
}
__getattr__ = loader(__name__, _MODULES)

__all__ = sorted(" ".join(_MODULES.values()).split())
