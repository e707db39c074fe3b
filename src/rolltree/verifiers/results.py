"""The results of `generate`, their files in vf-eval's format, and vf-eval itself."""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rolltree._helpers.files import whole_file, write_whole
from rolltree.environments.dataset import datasets_package
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.estimate import mean
from rolltree.values.types import SamplingArgs, State
from rolltree.verifiers.helpers import (
    messages_to_printable,
    print_prompt_completions_sample,
    sanitize_tool_calls,
)
from rolltree.verifiers.packages import load_environment


def get_results_path(env_id: str, model: str, base_path: Path = Path("./outputs")) -> Path:
    """Return a new folder for the results of one evaluation."""
    # vf-tui splits the folder's name at the first `--`, so an organisation's slash may become
    # `--`, too.
    name = f"{env_id}--{model.replace('/', '--')}"
    return base_path / "evals" / name / uuid4().hex[:8]


def get_eval_results_path(config: Any) -> Path:
    """Return a new folder for results: in the environment's own folder if there is one."""
    folder = Path(config.env_dir_path) / config.env_id.replace("-", "_")
    base = folder / "outputs" if folder.exists() else Path("./outputs")
    return get_results_path(config.env_id, config.model, base)


logger = logging.getLogger("rolltree.verifiers")


class _Columns(dict[str, Any]):
    """A dict whose keys can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}.{did_you_mean(name, list(self))}"
        )


class GenerateMetadata(_Columns):
    """The settings of a batch, and the means over its rollouts that did not fail."""

    env_id: str
    env_args: dict[str, Any]
    model: str
    base_url: str
    num_examples: int
    rollouts_per_example: int
    sampling_args: SamplingArgs
    date: str
    time_ms: float
    avg_reward: float
    avg_metrics: dict[str, float]
    state_columns: list[str]
    path_to_save: Path


class GenerateOutputs(_Columns):
    """Finished rollouts by column: `results["reward"]` is `results.reward`.

    The reward of a failed rollout is None; `results.num_failed` counts them.
    """

    prompt: list[Any]
    completion: list[Any]
    answer: list[Any]
    state: list[State]
    task: list[str]
    info: list[Any]
    example_id: list[int]
    reward: list[float]
    metrics: dict[str, list[float]]
    metadata: GenerateMetadata

    @property
    def num_failed(self) -> int:
        """How many rollouts failed; `state["error"]` says how."""
        return sum(state.get("error") is not None for state in self["state"])

    @property
    def stop_conditions(self) -> list[str | None]:
        """The condition that ended each rollout."""
        return [state.get("stop_condition") for state in self["state"]]


def result_columns(results: Any) -> dict[str, list[Any]]:
    """Return the columns of `results.jsonl`, in their order."""
    states = results["state"]
    columns: dict[str, list[Any]] = {
        "example_id": results["example_id"],
        "prompt": [sanitize_tool_calls(messages_to_printable(p)) for p in results["prompt"]],
        "completion": [
            sanitize_tool_calls(messages_to_printable(c)) for c in results["completion"]
        ],
        "task": results["task"],
        "reward": results["reward"],
    }
    for name in ("generation_ms", "scoring_ms", "total_ms"):
        columns[name] = [(state.get("timing") or {}).get(name) for state in states]
    # Columns without content are left out, as in verifiers.
    if any(info != {} for info in results["info"]):
        columns["info"] = results["info"]
    if any(answer != "" for answer in results["answer"]):
        columns["answer"] = results["answer"]
    columns.update(results["metrics"])
    for name in results["metadata"]["state_columns"] or ():
        columns[name] = [_plain(state.get(name)) for state in states]
    return columns


def _plain(value: Any) -> Any:
    """Return a value of a state as JSON data; a value that JSON cannot hold becomes a string."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    dump = getattr(value, "model_dump", None) or getattr(value, "as_dict", None)
    return _plain(dump()) if callable(dump) else str(value)


def make_dataset(results: Any, **kwargs: Any) -> Any:
    """Return finished rollouts as a Hugging Face `Dataset`, a row per rollout.

    Raises:
        ConfigError: the `datasets` package is missing, or a column holds values of several types.
    """
    datasets = datasets_package("a Hugging Face Dataset of the results")
    try:
        # pyarrow infers one type per column from its first values and raises on the others.
        return datasets.Dataset.from_dict(result_columns(results))
    except (TypeError, ValueError, OverflowError) as error:  # what pyarrow raises
        raise ConfigError(
            f"the results do not fit into a Dataset ({error}): each column of one must hold "
            "values of one type. Leave that state column out, or read results.jsonl."
        ) from error


def sanitize_metadata(metadata: Any) -> dict[str, Any]:
    """Return metadata without its path and date, as `metadata.json` has them."""
    return {key: metadata[key] for key in metadata if key not in ("path_to_save", "date")}


def get_hf_hub_dataset_name(results: Any) -> str:
    """Return the name under which results are pushed to the Hugging Face hub."""
    found = results["metadata"]
    model = found["model"].replace("/", "_")
    counts = f"n{found['num_examples']}_r{found['rollouts_per_example']}"
    return f"{found['env_id']}_{model}_{counts}"


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep `datasets` from writing progress bars and notes within the block."""
    from datasets import disable_progress_bar, enable_progress_bar
    from datasets.utils import logging as verbosity

    before = verbosity.get_verbosity()
    verbosity.set_verbosity(verbosity.WARNING)
    disable_progress_bar()
    try:
        yield
    finally:
        verbosity.set_verbosity(before)
        enable_progress_bar()


def save_to_disk(dataset: Any, metadata_dict: dict[str, Any], path_to_save: Path) -> None:
    """Write a data set as `results.jsonl`, and `metadata.json` next to it."""
    path = Path(path_to_save)
    path.mkdir(parents=True, exist_ok=True)
    with quiet_datasets(), whole_file(path / "results.jsonl") as part:
        dataset.to_json(part)
    _write_metadata(metadata_dict, path)


def _write_metadata(metadata: dict[str, Any], path: Path) -> None:
    text = json.dumps(_plain(metadata))
    write_whole(path / "metadata.json", text)


def save_rollout_results(
    results: Any, push_to_hf_hub: bool = False, hf_hub_dataset_name: str | None = None
) -> None:
    """Write `results.jsonl` and `metadata.json` into `metadata["path_to_save"]`.

    If the results do not fit into a `Dataset`, or `datasets` is missing, they are written without
    one.

    Raises:
        ConfigError: they are to be pushed to the hub, but cannot be made a `Dataset`.
    """
    path = Path(results["metadata"]["path_to_save"])
    try:
        dataset = make_dataset(results)
    except ConfigError:
        if push_to_hf_hub:
            raise
        dataset = None
    metadata = sanitize_metadata(results["metadata"])
    if dataset is not None:
        save_to_disk(dataset, metadata, path)
    else:
        path.mkdir(parents=True, exist_ok=True)
        columns = result_columns(results)
        rows = zip(*columns.values(), strict=True)
        lines = [json.dumps(dict(zip(columns, map(_plain, row), strict=True))) for row in rows]
        write_whole(path / "results.jsonl", "".join(f"{line}\n" for line in lines))
        _write_metadata(metadata, path)
    logger.info("results are in %s", path)
    if push_to_hf_hub:
        name = hf_hub_dataset_name or get_hf_hub_dataset_name(results)
        dataset.push_to_hub(name)
        logger.info("results were pushed to the Hugging Face hub as %s", name)


def setup_client(config: Any) -> Any:
    """Return an `AsyncOpenAI` with the settings of a `ClientConfig`.

    Raises:
        ConfigError: the `openai` package is missing.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout
    except ImportError as error:
        raise ConfigError(
            "setup_client returns an AsyncOpenAI, which needs the `openai` package. Install it "
            "with `pip install rolltree[openai]`."
        ) from error
    # The openai package uses `httpx` or `httpx2`, and refuses clients of the other one, so the
    # classes come from the module that its own client inherits from.
    kinds = {kind.__name__: kind for kind in DefaultAsyncHttpxClient.__mro__}
    httpx: Any = importlib.import_module(kinds["AsyncClient"].__module__.partition(".")[0])
    limits = httpx.Limits(
        max_connections=config.max_connections,
        max_keepalive_connections=config.max_keepalive_connections,
    )
    http_client = httpx.AsyncClient(
        limits=limits,
        # An hour for an answer, as in verifiers, but a missing server is noticed within seconds.
        timeout=Timeout(config.timeout, connect=5.0),
        headers=config.extra_headers,
    )
    return AsyncOpenAI(
        base_url=config.api_base_url,
        api_key=os.getenv(config.api_key_var, "EMPTY"),
        max_retries=config.max_retries,
        http_client=http_client,
    )


def load_endpoints(endpoints_path: str) -> dict[str, Any]:
    """Return `ENDPOINTS` of a Python file, or of the one named endpoints in a folder.

    If there is no such file, or it has no `ENDPOINTS`, a warning is logged and the dict is empty.
    """
    path = Path(endpoints_path)
    file = path / "endpoints.py" if path.is_dir() else path
    try:
        return dict(runpy.run_path(str(file))["ENDPOINTS"])
    except (ImportError, KeyError, FileNotFoundError) as error:
        logger.warning(
            "there is no endpoint registry at %s (%s). Name the model (-m), the base URL (-b) and "
            "the variable with the API key (-k).",
            endpoints_path,
            error,
        )
        return {}


async def run_evaluation(config: Any) -> GenerateOutputs:
    """Load the environment of an `EvalConfig`, evaluate it, and print and save the results."""
    client = setup_client(config.client_config)
    environment: Any = load_environment(config.env_id, **config.env_args)
    async with client:
        results: GenerateOutputs = await environment.evaluate(
            client=client,
            model=config.model,
            sampling_args=config.sampling_args,
            num_examples=config.num_examples,
            rollouts_per_example=config.rollouts_per_example,
            max_concurrent=config.max_concurrent,
            max_concurrent_generation=config.max_concurrent_generation,
            max_concurrent_scoring=config.max_concurrent_scoring,
            results_path=get_eval_results_path(config),
            state_columns=config.state_columns,
            save_results=config.save_results,
            save_every=config.save_every,
        )
    if config.print_results:
        print_results(results)
    if config.save_results:
        save_rollout_results(results, config.save_to_hf_hub, config.hf_hub_dataset_name)
    return results


def print_results(results: Any, num_samples: int = 1) -> None:
    """Print what was run, the first rollouts, and every reward and metric with its mean."""
    metadata = results["metadata"]
    print("--- Evaluation ---")
    print(f"Environment: {metadata['env_id']}")
    print(f"Model: {metadata['model']}")
    print(f"Provider: {metadata['base_url']}")
    print(f"Examples: {metadata['num_examples']}")
    print(f"Rollouts per example: {metadata['rollouts_per_example']}")
    print("--- Example ---")
    print_prompt_completions_sample(
        [messages_to_printable(prompt) for prompt in results["prompt"]],
        [messages_to_printable(completion) for completion in results["completion"]],
        [reward if reward is not None else float("nan") for reward in results["reward"]],
        step=0,
        num_samples=num_samples,
    )
    print("--- All ---")
    print("Rewards:")
    for name, values in {"reward": results["reward"], **results["metrics"]}.items():
        _print_values(name, values, metadata["rollouts_per_example"])


def _print_values(name: str, values: Sequence[float | None], num_trials: int) -> None:
    known = [value for value in values if value is not None]
    average = mean(known) if known else 0.0
    spread = statistics.pstdev(known) if known else 0.0
    print(f"{name}: avg - {average:.3f}, std - {spread:.3f}")
    for trial in range(num_trials):
        shown = [None if value is None else round(value, 3) for value in values[trial::num_trials]]
        print(f"r{trial + 1}: {shown}")
