"""rolltree: reinforcement learning of LLM agents on the exact tokens the engine saw and sampled.

    import rolltree as rt

    environment = rt.load_environment("arithmetic")
    report = rt.train(environment=environment, model="smollm2-135m", num_steps=28)

Names are loaded on first use (PEP 562): importing rolltree imports neither torch nor a web server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rolltree import wings

if TYPE_CHECKING:
    from rolltree.agents import Agent as Agent
    from rolltree.agents import ReActAgent as ReActAgent
    from rolltree.agents import ToolAgent as ToolAgent
    from rolltree.environments import EnvGroup as EnvGroup
    from rolltree.environments import Environment as Environment
    from rolltree.environments import GenerateMetadata as GenerateMetadata
    from rolltree.environments import GenerateResults as GenerateResults
    from rolltree.environments import GymEnv as GymEnv
    from rolltree.environments import HarborEnv as HarborEnv
    from rolltree.environments import MCPEnv as MCPEnv
    from rolltree.environments import MultiTurnEnv as MultiTurnEnv
    from rolltree.environments import OpenEnv as OpenEnv
    from rolltree.environments import PythonEnv as PythonEnv
    from rolltree.environments import ReasoningGymEnv as ReasoningGymEnv
    from rolltree.environments import SandboxEnv as SandboxEnv
    from rolltree.environments import SingleTurnEnv as SingleTurnEnv
    from rolltree.environments import StatefulToolEnv as StatefulToolEnv
    from rolltree.environments import TextArenaEnv as TextArenaEnv
    from rolltree.environments import ToolEnv as ToolEnv
    from rolltree.environments import WorldEnv as WorldEnv
    from rolltree.environments import cleanup as cleanup
    from rolltree.environments import load_environment as load_environment
    from rolltree.environments import stop as stop
    from rolltree.environments import teardown as teardown
    from rolltree.environments.parsers import MaybeThinkParser as MaybeThinkParser
    from rolltree.environments.parsers import Parser as Parser
    from rolltree.environments.parsers import ThinkParser as ThinkParser
    from rolltree.environments.parsers import XMLParser as XMLParser
    from rolltree.environments.parsers import compose_parsers as compose_parsers
    from rolltree.environments.parsers import extract_boxed_answer as extract_boxed_answer
    from rolltree.environments.parsers import extract_hash_answer as extract_hash_answer
    from rolltree.environments.rubrics import JudgeRubric as JudgeRubric
    from rolltree.environments.rubrics import MathRubric as MathRubric
    from rolltree.environments.rubrics import Rubric as Rubric
    from rolltree.environments.rubrics import RubricGroup as RubricGroup
    from rolltree.environments.rubrics import ToolRubric as ToolRubric
    from rolltree.environments.rubrics import run_inline as run_inline
    from rolltree.evaluation import evaluate as evaluate
    from rolltree.evaluation import evaluate_async as evaluate_async
    from rolltree.gateway.harbor_program import HarborProgramEnv as HarborProgramEnv
    from rolltree.gateway.program_env import ProgramEnv as ProgramEnv
    from rolltree.gateway.server import Gateway as _Gateway
    from rolltree.inference import ModelClient as ModelClient
    from rolltree.inference import OpenAIClient as OpenAIClient
    from rolltree.inference import as_client as as_client
    from rolltree.inference import parse_response_messages as parse_response_messages
    from rolltree.inference import parse_response_tokens as parse_response_tokens
    from rolltree.inference.local import local_client as local_client
    from rolltree.inference.models import load_model as load_model
    from rolltree.records import AuditReport as AuditReport
    from rolltree.records import RunData as RunData
    from rolltree.records import audit as audit
    from rolltree.records import compare as compare
    from rolltree.records import export_run as export_run
    from rolltree.records import read_run as read_run
    from rolltree.records import replay as replay
    from rolltree.records import replay_many as replay_many
    from rolltree.records import rescore as rescore
    from rolltree.rollouts import GroupStrategy as GroupStrategy
    from rolltree.rollouts import RolloutEngine as RolloutEngine
    from rolltree.rollouts import RolloutSource as RolloutSource
    from rolltree.rollouts import build_requests as build_requests
    from rolltree.samples import build_samples as build_samples
    from rolltree.samples import pack_samples as pack_samples
    from rolltree.samples import (
        process_trajectories_for_training as process_trajectories_for_training,
    )
    from rolltree.samples import prune_sample as prune_sample
    from rolltree.store import Run as Run
    from rolltree.testing import ScriptedClient as ScriptedClient
    from rolltree.tokens import TokenTree as TokenTree
    from rolltree.tokens import Trajectory as Trajectory
    from rolltree.training import LogprobModel as LogprobModel
    from rolltree.training import Reporter as Reporter
    from rolltree.training import Silent as Silent
    from rolltree.training import TrainConfig as TrainConfig
    from rolltree.training import Trainer as Trainer
    from rolltree.training import TrainReport as TrainReport
    from rolltree.training import assign_credit as assign_credit
    from rolltree.training import collate as collate
    from rolltree.training import export_model as export_model
    from rolltree.training import load_train_config as load_train_config
    from rolltree.training import open_run as open_run
    from rolltree.training import supervised_states as supervised_states
    from rolltree.training.launch import train as train
    from rolltree.training.launch import train_async as train_async
    from rolltree.values.errors import ConfigError as ConfigError
    from rolltree.values.errors import ModelError as ModelError
    from rolltree.values.errors import PromptTooLong as PromptTooLong
    from rolltree.values.errors import RolloutTimeout as RolloutTimeout
    from rolltree.values.errors import RolltreeError as RolltreeError
    from rolltree.values.errors import UnknownName as UnknownName
    from rolltree.values.steps import AgentStep as AgentStep
    from rolltree.values.steps import EnvironmentStep as EnvironmentStep
    from rolltree.values.steps import ParseResult as ParseResult
    from rolltree.values.steps import Rollout as Rollout
    from rolltree.values.steps import StepOutcome as StepOutcome
    from rolltree.values.types import BaseRolloutInput as BaseRolloutInput
    from rolltree.values.types import ChatMessage as ChatMessage
    from rolltree.values.types import ErrorRecord as ErrorRecord
    from rolltree.values.types import FinishReason as FinishReason
    from rolltree.values.types import Info as Info
    from rolltree.values.types import Messages as Messages
    from rolltree.values.types import MessageType as MessageType
    from rolltree.values.types import ModelResponse as ModelResponse
    from rolltree.values.types import RolloutInput as RolloutInput
    from rolltree.values.types import RolloutRequest as RolloutRequest
    from rolltree.values.types import RolloutResult as RolloutResult
    from rolltree.values.types import RolloutTiming as RolloutTiming
    from rolltree.values.types import Sample as Sample
    from rolltree.values.types import SamplingArgs as SamplingArgs
    from rolltree.values.types import SamplingParams as SamplingParams
    from rolltree.values.types import State as State
    from rolltree.values.types import TrainingExample as TrainingExample
    from rolltree.values.types import TrajectoryStep as TrajectoryStep
    from rolltree.values.types import TrajectoryStepTokens as TrajectoryStepTokens
    from rolltree.values.types import TruncationReason as TruncationReason

if TYPE_CHECKING:
    gateway = _Gateway  # the room is callable

_ROOMS: dict[str, str] = {
    **{wing.where: wing.names for wing in wings.rows("rolltree")},
    "environments": "EnvGroup Environment GenerateMetadata GenerateResults GymEnv HarborEnv "
    "MCPEnv MultiTurnEnv OpenEnv PythonEnv ReasoningGymEnv SandboxEnv SingleTurnEnv "
    "StatefulToolEnv TextArenaEnv ToolEnv WorldEnv cleanup load_environment stop teardown",
    "values.errors": "ConfigError ModelError PromptTooLong RolloutTimeout RolltreeError "
    "UnknownName",
    "evaluation": "evaluate evaluate_async",
    "inference": "ModelClient OpenAIClient as_client parse_response_messages parse_response_tokens",
    "inference.local": "local_client",
    "training.launch": "train train_async",
    "inference.models": "load_model",
    "environments.parsers": "MaybeThinkParser Parser ThinkParser XMLParser compose_parsers "
    "extract_boxed_answer extract_hash_answer",
    "records": "AuditReport RunData audit compare export_run read_run replay replay_many rescore",
    "rollouts": "GroupStrategy RolloutEngine RolloutSource build_requests",
    "environments.rubrics": "JudgeRubric MathRubric Rubric RubricGroup ToolRubric run_inline",
    "samples": "build_samples pack_samples process_trajectories_for_training prune_sample",
    "values.steps": "AgentStep EnvironmentStep ParseResult Rollout StepOutcome",
    "store": "Run",
    "tokens": "TokenTree Trajectory",
    "training": "LogprobModel Reporter Silent TrainConfig TrainReport Trainer assign_credit "
    "collate export_model load_train_config open_run supervised_states",
    "values.types": "BaseRolloutInput ChatMessage ErrorRecord FinishReason Info MessageType "
    "Messages ModelResponse RolloutInput RolloutRequest RolloutResult RolloutTiming Sample "
    "SamplingArgs SamplingParams State TrainingExample TrajectoryStep TrajectoryStepTokens "
    "TruncationReason",
}
_OLD_NAMES: dict[str, str] = {
    "verifiers.verifiers": "ChatCompletionToolParam ChatMessages Endpoints GenerateOutputs "
    "GroupRewardFunc IndividualRewardFunc Message RewardFunc concat_messages load_example_dataset "
    "maybe_await print_prompt_completions_sample setup_logging",
}
"""Names of verifiers 0.1.8 for environments whose import line was changed (`verifiers`)."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}
_OLD_ROOM_OF = {name: room for room, names in _OLD_NAMES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted([*_ROOM_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _ROOMS or name in ("gateway", "values", "verifiers"):
        return importlib.import_module(f"rolltree.{name}")
    room = _ROOM_OF.get(name) or _OLD_ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'rolltree' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rolltree.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
