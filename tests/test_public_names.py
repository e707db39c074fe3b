"""What `import rolltree` gives, and what it costs."""

import subprocess
import sys

import pytest

import rolltree

NAMES = [
    "Agent",
    "AgentStep",
    "AuditReport",
    "BaseRolloutInput",
    "ChatMessage",
    "ConfigError",
    "EnvGroup",
    "Environment",
    "EnvironmentStep",
    "ErrorRecord",
    "FinishReason",
    "GenerateMetadata",
    "GenerateResults",
    "GroupStrategy",
    "GymEnv",
    "HarborEnv",
    "HarborProgramEnv",
    "Info",
    "JudgeRubric",
    "LogprobModel",
    "MCPEnv",
    "MathRubric",
    "MaybeThinkParser",
    "MessageType",
    "Messages",
    "ModelClient",
    "ModelError",
    "ModelResponse",
    "MultiTurnEnv",
    "OpenAIClient",
    "OpenEnv",
    "ParseResult",
    "Parser",
    "ProgramEnv",
    "PromptTooLong",
    "PythonEnv",
    "ReActAgent",
    "ReasoningGymEnv",
    "Reporter",
    "Rollout",
    "RolloutEngine",
    "RolloutInput",
    "RolloutRequest",
    "RolloutResult",
    "RolloutSource",
    "RolloutTimeout",
    "RolloutTiming",
    "RolltreeError",
    "Rubric",
    "RubricGroup",
    "Run",
    "RunData",
    "Sample",
    "SamplingArgs",
    "SamplingParams",
    "SandboxEnv",
    "ScriptedClient",
    "Silent",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "StepOutcome",
    "TextArenaEnv",
    "ThinkParser",
    "TokenTree",
    "ToolAgent",
    "ToolEnv",
    "ToolRubric",
    "TrainConfig",
    "TrainReport",
    "Trainer",
    "TrainingExample",
    "Trajectory",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "TruncationReason",
    "UnknownName",
    "WorldEnv",
    "XMLParser",
    "__version__",
    "as_client",
    "assign_credit",
    "audit",
    "build_requests",
    "build_samples",
    "cleanup",
    "collate",
    "compare",
    "compose_parsers",
    "evaluate",
    "evaluate_async",
    "export_model",
    "export_run",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_environment",
    "load_model",
    "load_train_config",
    "local_client",
    "open_run",
    "pack_samples",
    "parse_response_messages",
    "parse_response_tokens",
    "process_trajectories_for_training",
    "prune_sample",
    "read_run",
    "replay",
    "replay_many",
    "rescore",
    "run_inline",
    "stop",
    "supervised_states",
    "teardown",
    "train",
    "train_async",
]


def test_the_public_names_are_pinned():
    assert rolltree.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_exists(name):
    value = getattr(rolltree, name)
    assert value is getattr(rolltree, name)
    assert name in dir(rolltree)


SPEC_1 = (
    "BaseRolloutInput ChatCompletionToolParam Info Messages MessageType ModelResponse RolloutInput "
    "RolloutTiming SamplingArgs State TrainingExample TrajectoryStep TrajectoryStepTokens "
    "MultiTurnEnv SandboxEnv SingleTurnEnv ToolEnv Rubric cleanup concat_messages load_environment "
    "parse_response_messages parse_response_tokens process_trajectories_for_training stop teardown"
)


@pytest.mark.parametrize("name", SPEC_1.split())
def test_the_names_of_spec_1_are_at_the_root(name):
    assert getattr(rolltree, name) is not None


def test_rooms_are_attributes():
    assert rolltree.environments.rubrics.Rubric is rolltree.Rubric


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Enviroment"):
        _ = rolltree.Enviroment


def run(code):
    """Return what a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def import_cpu_s(line):
    """Return the CPU seconds of an import in a fresh interpreter, the least of three."""
    code = f"import time; t = time.process_time(); {line}; print(time.process_time() - t)"
    return min(float(run(code)) for _ in range(3))


@pytest.fixture(scope="module")
def yardstick_s():
    """CPU seconds of importing what every user has: slower machines have a longer yardstick."""
    return import_cpu_s("import asyncio, json, numpy")


def test_import_is_lazy(yardstick_s):
    assert import_cpu_s("import rolltree") < 1.5 * yardstick_s  # 0.1


def test_the_names_an_environment_needs_load_fast_too(yardstick_s):
    names = "Environment, Rubric, XMLParser, load_environment, State"
    assert import_cpu_s(f"from rolltree import {names}") < 6 * yardstick_s  # 3.6


HEAVY = ("torch", "transformers", "starlette", "uvicorn", "datasets", "openai", "pandas")


def test_nothing_heavy_is_imported():
    loaded = run(
        "import sys, rolltree\n"
        "torch_rooms = ('training', 'training.launch', 'inference.local', 'gateway')\n"
        "heavy = {name for room in torch_rooms for name in rolltree._ROOMS[room].split()}\n"
        "for name in set(rolltree.__all__) - {'evaluate', *heavy}:\n"
        "    getattr(rolltree, name)\n"
        "print(*sys.modules)"
    ).split()
    assert not set(HEAVY) & set(loaded)


def test_trees_and_samples_need_numpy_alone():
    loaded = run("import sys, rolltree.tokens, rolltree.samples; print(*sys.modules)").split()
    assert not {*HEAVY, "aiohttp", "httpx", "jinja2"} & set(loaded)
