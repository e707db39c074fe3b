"""Maps each public name of verifiers 0.1.8 to its module there and here.

Nothing is imported here: `rolltree.verifiers.verifiers` imports each name on first use.
"""

from __future__ import annotations

_COMPAT = "rolltree.verifiers"

_OWN = """
types: AsyncOpenAI ChatCompletion ChatCompletionMessageToolCall ChatCompletionRole \
ChatCompletionToolParam Completion FunctionDefinition FunctionParameters
types < configs: ClientConfig EvalConfig
types < results: GenerateMetadata GenerateOutputs
types < rolltree.environments.rubrics: RewardFunc
types < rolltree.values.types: ChatMessage Info Messages MessageType RolloutInput BaseRolloutInput \
SamplingArgs State TrajectoryStep
types < types: RolloutTiming TrajectoryStepTokens ChatMessages Endpoint Endpoints \
EnvironmentTeardown RolloutCleanup StopCondition ModelResponse GroupRewardFunc \
IndividualRewardFunc JsonPrimitive Message ProcessedOutputs RolloutScore RolloutScores
decorators < environments: stop cleanup teardown
envs:
envs.environment < environments: Environment
envs.multiturn_env < environments: MultiTurnEnv
envs.singleturn_env < environments: SingleTurnEnv
envs.tool_env < tool_environments: ToolEnv
envs.stateful_tool_env < tool_environments: StatefulToolEnv
envs.sandbox_env < sandbox_environments: SandboxEnv
envs.python_env < sandbox_environments: PythonEnv PythonWorkerState
envs.env_group < env_group: EnvGroup EnvGroupRubric
envs.textarena_env < textarena_environment: TextArenaEnv
envs.reasoninggym_env < reasoning_gym_environment: DEFAULT_SYSTEM_PROMPT ReasoningGymEnv
rubrics:
rubrics.rubric < rubrics: Rubric
rubrics.rubric_group < rubrics: RubricGroup
rubrics.judge_rubric < rubrics: DEFAULT_JUDGE_PROMPT JudgeRubric
rubrics.tool_rubric < rubrics: ToolRubric
rubrics.math_rubric < rubrics: MathRubric
parsers:
parsers.parser < parsers: Parser
parsers.think_parser < parsers: ThinkParser
parsers.maybe_think_parser < parsers: MaybeThinkParser
parsers.xml_parser < parsers: XMLParser
utils:
utils.async_utils < helpers: maybe_await maybe_semaphore NullAsyncContext
utils.client_utils < results: setup_client
utils.data_utils < rolltree.environments.parsers: extract_boxed_answer
utils.data_utils < datasets: BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT extract_hash_answer \
format_dataset get_preprocess_fn load_example_dataset strip_non_numeric
utils.decorators < environments: stop cleanup teardown
utils.env_utils < packages: load_environment
utils.eval_utils < results: get_hf_hub_dataset_name make_dataset quiet_datasets sanitize_metadata \
save_rollout_results save_to_disk load_endpoints print_results run_evaluation
utils.logging_utils < helpers: print_prompt_completions_sample setup_logging
utils.message_utils < helpers: strip_nones_from_content concat_messages message_to_printable \
messages_to_printable sanitize_tool_calls get_overlong_prompt_dummy_response
utils.path_utils < results: get_eval_results_path get_results_path
utils.response_utils < helpers: parse_response_messages parse_response_tokens
utils.tool_utils < tools: convert_func_to_oai_tool
utils.tools < example_tools: ask calculator python search search_ddg
"""
_OTHERS: dict[str, str] = {
    # Published environments also import names from verifiers' modules that these import from
    # elsewhere. One table serves all modules (design/0020-import-verifiers.md).
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

MODULES: dict[str, tuple[str, ...]] = {}
"""The public names of each module of verifiers; a module without names is a package."""

SOURCE_OF = {name: module for module, names in _OTHERS.items() for name in names.split()}
"""For each name, the module that defines it: rolltree's or another package's."""

# A line is `MODULE < SOURCE: NAMES`: verifiers' module, the one here, and the names. Without a
# source, the names are in `_OTHERS`, or the module is a package.
for _line in _OWN.strip().splitlines():
    _places, _, _names = _line.partition(":")
    _path, _, _source = _places.partition(" < ")
    MODULES[_path] = (*MODULES.get(_path, ()), *_names.split())
    if _source:
        _home = _source if _source.startswith("rolltree.") else f"{_COMPAT}.{_source}"
        SOURCE_OF.update(dict.fromkeys(_names.split(), _home))

STAND_INS: dict[str, tuple[str, str]] = {
    "APIClient": ("types", "SimpleNamespace"),
    "AdvancedConfigs": (f"{_COMPAT}.sandbox_client", "AdvancedConfigs"),
    "AsyncSandboxClient": (f"{_COMPAT}.sandbox_client", "SandboxClient"),
    "CreateSandboxRequest": (f"{_COMPAT}.sandbox_client", "SandboxRequest"),
    "SandboxClient": (f"{_COMPAT}.sandbox_client", "SandboxClient"),
}
"""Replacements (module, name) for names of `prime_sandboxes` if that package is not installed."""

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

SCRIPTS: dict[str, str] = {
    "scripts": f"{_COMPAT}.scripts",
    **{f"scripts.{name}": f"{_COMPAT}.scripts.{name}" for name in ("eval", "init", "install")},
}
"""verifiers' scripts and their package, which are files of their own here."""

REMOVED = frozenset(
    (
        *("RLTrainer", "RLConfig", "GRPOTrainer", "GRPOConfig"),
        *("grpo_defaults", "lora_defaults", "get_model", "get_model_and_tokenizer"),
    )
)
"""Names of verifiers' trainer, which has no counterpart with the same settings."""
