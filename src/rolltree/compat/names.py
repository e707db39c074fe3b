"""Maps each public name of verifiers 0.1.8 to its module there and here.

Pure data. Names of other packages are fetched from there when used.
"""

from __future__ import annotations

_COMPAT = "rolltree.compat"

SOURCES: dict[str, str] = {
    f"{_COMPAT}.tools": "convert_func_to_oai_tool",
    f"{_COMPAT}.example_tools": "ask calculator python search search_ddg",
    f"{_COMPAT}.packages": "load_environment",
    f"{_COMPAT}.environments": "Environment MultiTurnEnv SingleTurnEnv cleanup stop teardown",
    f"{_COMPAT}.tool_environments": "StatefulToolEnv ToolEnv",
    f"{_COMPAT}.env_group": "EnvGroup EnvGroupRubric",
    f"{_COMPAT}.sandbox_environments": "PythonEnv PythonWorkerState SandboxEnv",
    f"{_COMPAT}.reasoning_gym_environment": "DEFAULT_SYSTEM_PROMPT ReasoningGymEnv",
    f"{_COMPAT}.textarena_environment": "TextArenaEnv",
    f"{_COMPAT}.results": "GenerateMetadata GenerateOutputs get_eval_results_path "
    "get_hf_hub_dataset_name get_results_path load_endpoints make_dataset print_results "
    "quiet_datasets run_evaluation sanitize_metadata save_rollout_results save_to_disk "
    "setup_client",
    f"{_COMPAT}.rubrics": "DEFAULT_JUDGE_PROMPT JudgeRubric MathRubric Rubric RubricGroup "
    "ToolRubric",
    f"{_COMPAT}.parsers": "MaybeThinkParser Parser ThinkParser XMLParser",
    f"{_COMPAT}.configs": "ClientConfig EvalConfig",
    f"{_COMPAT}.datasets": "BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT extract_hash_answer "
    "format_dataset get_preprocess_fn load_example_dataset strip_non_numeric",
    f"{_COMPAT}.helpers": "NullAsyncContext concat_messages maybe_await maybe_semaphore "
    "message_to_printable messages_to_printable parse_response_messages parse_response_tokens "
    "get_overlong_prompt_dummy_response print_prompt_completions_sample sanitize_tool_calls "
    "setup_logging strip_nones_from_content",
    f"{_COMPAT}.types": "RolloutTiming TrajectoryStepTokens ChatMessages Endpoint Endpoints "
    "EnvironmentTeardown RolloutCleanup StopCondition ModelResponse GroupRewardFunc "
    "IndividualRewardFunc JsonPrimitive Message ProcessedOutputs RolloutScore RolloutScores",
    "rolltree.rubrics": "RewardFunc",
    "rolltree.parsers": "extract_boxed_answer",
    "rolltree.types": "ChatMessage Info Messages MessageType RolloutInput BaseRolloutInput "
    "SamplingArgs State TrajectoryStep",
    # What verifiers' modules import from elsewhere is importable from them, too, and published
    # environments do so. One table serves all modules (design/0020-import-verifiers.md).
    "openai": "APIError APITimeoutError AsyncOpenAI BadRequestError OpenAI RateLimitError",
    "openai.types": "CompletionChoice",
    "openai.types.chat": "ChatCompletion ChatCompletionAssistantMessageParam "
    "ChatCompletionFunctionToolParam ChatCompletionMessage ChatCompletionMessageParam "
    "ChatCompletionMessageToolCall ChatCompletionRole ChatCompletionToolParam",
    "openai.types.chat.chat_completion": "Choice",
    "openai.types.completion": "Completion",
    "openai.types.shared_params": "FunctionDefinition FunctionParameters",
    "typing": "TYPE_CHECKING Any AsyncContextManager Awaitable Callable Dict List Literal Optional "
    "Tuple TypeVar cast",
    "typing_extensions": "TypedDict",
    "abc": "ABC abstractmethod",
    "collections.abc": "Mapping",
    "concurrent.futures": "ThreadPoolExecutor",
    "contextlib": "contextmanager",
    "copy": "deepcopy",
    "datetime": "datetime",
    "pathlib": "Path",
    "types": "SimpleNamespace",
    "agents.function_schema": "function_schema",
    "datasets": "Dataset concatenate_datasets disable_progress_bar enable_progress_bar "
    "load_dataset",
    "httpx": "AsyncClient",
    "math_verify": "parse verify",
    "prime_sandboxes": "AdvancedConfigs AsyncSandboxClient CreateSandboxRequest SandboxClient",
    "prime_sandboxes.core": "APIClient",
    "pydantic": "BaseModel",
    "reasoning_gym.composite": "DatasetSpec",
    "reasoning_gym.factory": "ProceduralDataset",
    "reasoning_gym.utils": "SYSTEM_PROMPTS",
    "rich.console": "Console",
    "rich.panel": "Panel",
    "rich.table": "Table",
    "rich.text": "Text",
}

SOURCE_OF = {name: module for module, names in SOURCES.items() for name in names.split()}

STAND_INS: dict[str, tuple[str, str]] = {
    "APIClient": ("types", "SimpleNamespace"),
    "AdvancedConfigs": (f"{_COMPAT}.sandbox_client", "AdvancedConfigs"),
    "AsyncSandboxClient": (f"{_COMPAT}.sandbox_client", "SandboxClient"),
    "CreateSandboxRequest": (f"{_COMPAT}.sandbox_client", "SandboxRequest"),
    "SandboxClient": (f"{_COMPAT}.sandbox_client", "SandboxClient"),
}
"""Modules and names for those of `prime_sandboxes` if that package is not installed."""

_PLAIN = (
    "ast asyncio atexit base64 httpx importlib inspect json logging nltk os random re signal "
    "subprocess sys textwrap time uuid"
)
IMPORTED_MODULES: dict[str, str] = {
    **{name: name for name in _PLAIN.split()},
    "ds_logging": "datasets.utils.logging",
    "np": "numpy",
    "rg": "reasoning_gym",
    "ta": "textarena",
    "tc": "tenacity",
    "vf": f"{_COMPAT}.verifiers",
}
"""Modules that verifiers' modules import, by the name that they have there."""

_MODULES = f"""
types: {SOURCES["rolltree.types"]} {SOURCES[f"{_COMPAT}.types"]} ClientConfig EvalConfig \
RewardFunc GenerateMetadata GenerateOutputs AsyncOpenAI ChatCompletion \
ChatCompletionMessageToolCall ChatCompletionRole ChatCompletionToolParam Completion \
FunctionDefinition FunctionParameters
decorators: stop cleanup teardown
envs:
envs.environment: Environment
envs.multiturn_env: MultiTurnEnv
envs.singleturn_env: SingleTurnEnv
envs.tool_env: ToolEnv
envs.stateful_tool_env: StatefulToolEnv
envs.sandbox_env: SandboxEnv
envs.python_env: PythonEnv PythonWorkerState
envs.env_group: EnvGroup EnvGroupRubric
envs.textarena_env: TextArenaEnv
envs.reasoninggym_env: DEFAULT_SYSTEM_PROMPT ReasoningGymEnv
rubrics:
rubrics.rubric: Rubric
rubrics.rubric_group: RubricGroup
rubrics.judge_rubric: DEFAULT_JUDGE_PROMPT JudgeRubric
rubrics.tool_rubric: ToolRubric
rubrics.math_rubric: MathRubric
parsers:
parsers.parser: Parser
parsers.think_parser: ThinkParser
parsers.maybe_think_parser: MaybeThinkParser
parsers.xml_parser: XMLParser
utils:
utils.async_utils: maybe_await maybe_semaphore NullAsyncContext
utils.client_utils: setup_client
utils.data_utils: extract_boxed_answer {SOURCES[f"{_COMPAT}.datasets"]}
utils.decorators: stop cleanup teardown
utils.env_utils: load_environment
utils.eval_utils: get_hf_hub_dataset_name make_dataset quiet_datasets sanitize_metadata \
save_rollout_results save_to_disk load_endpoints print_results run_evaluation
utils.logging_utils: print_prompt_completions_sample setup_logging
utils.message_utils: strip_nones_from_content concat_messages message_to_printable \
messages_to_printable sanitize_tool_calls get_overlong_prompt_dummy_response
utils.path_utils: get_eval_results_path get_results_path
utils.response_utils: parse_response_messages parse_response_tokens
utils.tool_utils: convert_func_to_oai_tool
utils.tools: ask calculator python search search_ddg
"""
MODULES: dict[str, tuple[str, ...]] = {
    path: tuple(names.split())
    for path, _, names in (line.partition(":") for line in _MODULES.strip().splitlines())
}
"""The public names of each module of verifiers; a module without names is a package."""

SCRIPTS: dict[str, str] = {
    "scripts": f"{_COMPAT}.scripts",
    **{f"scripts.{name}": f"{_COMPAT}.scripts.{name}" for name in ("eval", "init", "install")},
    "scripts.tui": f"{_COMPAT}.scripts.tui",
}
"""Modules that are whole modules here, each with its own `main`."""

REMOVED = frozenset(
    (
        *("RLTrainer", "RLConfig", "GRPOTrainer", "GRPOConfig"),
        *("grpo_defaults", "lora_defaults", "get_model", "get_model_and_tokenizer"),
    )
)
"""Names of verifiers' trainer, which has no counterpart with the same settings."""
