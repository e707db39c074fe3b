"""Where each public name of verifiers 0.1.8 lives, there and here.

Pure data. Names of the openai package are fetched from there when used.
"""

from __future__ import annotations

_SHIMS = "rolltree.compat"

SOURCES: dict[str, str] = {
    f"{_SHIMS}.tools": "convert_func_to_oai_tool",
    f"{_SHIMS}.example_tools": "ask calculator python search search_ddg",
    f"{_SHIMS}.loading": "load_environment",
    f"{_SHIMS}.decorators": "cleanup stop teardown",
    f"{_SHIMS}.environments": "Environment MultiTurnEnv SingleTurnEnv",
    f"{_SHIMS}.tool_environments": "StatefulToolEnv ToolEnv",
    f"{_SHIMS}.env_group": "EnvGroup EnvGroupRubric",
    f"{_SHIMS}.sandbox_environments": "PythonEnv PythonWorkerState SandboxEnv",
    f"{_SHIMS}.reasoning_gym_environment": "DEFAULT_SYSTEM_PROMPT ReasoningGymEnv",
    f"{_SHIMS}.textarena_environment": "TextArenaEnv",
    f"{_SHIMS}.results": "GenerateMetadata GenerateOutputs get_hf_hub_dataset_name make_dataset "
    "quiet_datasets sanitize_metadata save_rollout_results save_to_disk",
    f"{_SHIMS}.evaluation": "load_endpoints print_results run_evaluation setup_client",
    f"{_SHIMS}.paths": "get_eval_results_path get_results_path",
    f"{_SHIMS}.rows": "format_dataset",
    "rolltree.rubrics": "RewardFunc",
    f"{_SHIMS}.rubrics": "MathRubric Rubric RubricGroup ToolRubric",
    f"{_SHIMS}.parsers": "MaybeThinkParser Parser ThinkParser XMLParser",
    "rolltree.parsers": "extract_boxed_answer",
    "rolltree.types": "ChatMessage Info Messages MessageType RolloutInput "
    "BaseRolloutInput SamplingArgs State TrajectoryStep",
    f"{_SHIMS}.judge": "DEFAULT_JUDGE_PROMPT JudgeRubric",
    f"{_SHIMS}.configs": "ClientConfig EvalConfig",
    f"{_SHIMS}.datasets": "BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT extract_hash_answer "
    "get_preprocess_fn load_example_dataset strip_non_numeric",
    f"{_SHIMS}.helpers": "NullAsyncContext concat_messages maybe_await maybe_semaphore "
    "message_to_printable messages_to_printable parse_response_messages parse_response_tokens "
    "get_overlong_prompt_dummy_response print_prompt_completions_sample sanitize_tool_calls "
    "strip_nones_from_content",
    f"{_SHIMS}.logs": "setup_logging",
    f"{_SHIMS}.hosted": "APIClient AdvancedConfigs AsyncSandboxClient CreateSandboxRequest "
    "SandboxClient",
    f"{_SHIMS}.types": "RolloutTiming TrajectoryStepTokens ChatMessages Endpoint Endpoints "
    "EnvironmentTeardown RolloutCleanup StopCondition ModelResponse "
    "GroupRewardFunc IndividualRewardFunc JsonPrimitive Message ProcessedOutputs RolloutScore "
    "RolloutScores",
    # What verifiers' modules import from elsewhere is importable from them, too.
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
    "vf": f"{_SHIMS}.verifiers",
}
"""Modules that verifiers' modules import, by the name that they have there."""

_TYPES = (
    SOURCES["rolltree.types"].split()
    + SOURCES[f"{_SHIMS}.types"].split()
    + [
        "ClientConfig",
        "EvalConfig",
        "RewardFunc",
        "GenerateMetadata",
        "GenerateOutputs",
        "AsyncOpenAI",
        "ChatCompletion",
    ]
    + ["ChatCompletionMessageToolCall", "ChatCompletionRole", "ChatCompletionToolParam"]
    + ["Completion", "FunctionDefinition", "FunctionParameters"]
)
_MESSAGES = (
    "strip_nones_from_content concat_messages message_to_printable messages_to_printable "
    "sanitize_tool_calls get_overlong_prompt_dummy_response"
)

MODULES: dict[str, tuple[str, ...]] = {
    "types": tuple(_TYPES),
    "decorators": ("stop", "cleanup", "teardown"),
    "envs": (),
    "envs.environment": ("Environment",),
    "envs.multiturn_env": ("MultiTurnEnv",),
    "envs.singleturn_env": ("SingleTurnEnv",),
    "envs.tool_env": ("ToolEnv",),
    "envs.stateful_tool_env": ("StatefulToolEnv",),
    "envs.sandbox_env": ("SandboxEnv",),
    "envs.python_env": ("PythonEnv", "PythonWorkerState"),
    "envs.env_group": ("EnvGroup", "EnvGroupRubric"),
    "envs.textarena_env": ("TextArenaEnv",),
    "envs.reasoninggym_env": ("DEFAULT_SYSTEM_PROMPT", "ReasoningGymEnv"),
    "rubrics": (),
    "rubrics.rubric": ("Rubric",),
    "rubrics.rubric_group": ("RubricGroup",),
    "rubrics.judge_rubric": ("DEFAULT_JUDGE_PROMPT", "JudgeRubric"),
    "rubrics.tool_rubric": ("ToolRubric",),
    "rubrics.math_rubric": ("MathRubric",),
    "parsers": (),
    "parsers.parser": ("Parser",),
    "parsers.think_parser": ("ThinkParser",),
    "parsers.maybe_think_parser": ("MaybeThinkParser",),
    "parsers.xml_parser": ("XMLParser",),
    "utils": (),
    "utils.async_utils": ("maybe_await", "maybe_semaphore", "NullAsyncContext"),
    "utils.client_utils": ("setup_client",),
    "utils.data_utils": (
        *("BOXED_SYSTEM_PROMPT", "THINK_BOXED_SYSTEM_PROMPT", "extract_boxed_answer"),
        *("extract_hash_answer", "load_example_dataset", "strip_non_numeric", "format_dataset"),
        "get_preprocess_fn",
    ),
    "utils.decorators": ("stop", "cleanup", "teardown"),
    "utils.env_utils": ("load_environment",),
    "utils.eval_utils": (
        *("get_hf_hub_dataset_name", "make_dataset", "quiet_datasets", "sanitize_metadata"),
        *("save_rollout_results", "save_to_disk", "load_endpoints", "print_results"),
        "run_evaluation",
    ),
    "utils.logging_utils": ("print_prompt_completions_sample", "setup_logging"),
    "utils.message_utils": tuple(_MESSAGES.split()),
    "utils.path_utils": ("get_eval_results_path", "get_results_path"),
    "utils.response_utils": ("parse_response_messages", "parse_response_tokens"),
    "utils.tool_utils": ("convert_func_to_oai_tool",),
    "utils.tools": ("ask", "calculator", "python", "search", "search_ddg"),
}

SCRIPTS: dict[str, str] = {
    "scripts": f"{_SHIMS}.scripts",
    "scripts.eval": f"{_SHIMS}.scripts.eval",
    "scripts.init": f"{_SHIMS}.scripts.init",
    "scripts.install": f"{_SHIMS}.scripts.install",
    "scripts.tui": f"{_SHIMS}.scripts.tui",
}
"""Modules that are whole modules here, each with a `main` of its own."""

REMOVED = frozenset(
    (
        *("RLTrainer", "RLConfig", "GRPOTrainer", "GRPOConfig"),
        *("grpo_defaults", "lora_defaults", "get_model", "get_model_and_tokenizer"),
    )
)
"""Names of verifiers' trainer, which has no counterpart with the same settings."""
