"""What vf-eval does: endpoints by name, an evaluation from a configuration, and its report."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rolltree.compat.helpers import messages_to_printable, print_prompt_completions_sample
from rolltree.compat.loading import load_environment
from rolltree.compat.paths import get_eval_results_path
from rolltree.compat.results import GenerateOutputs, save_rollout_results
from rolltree.errors import ConfigError

logger = logging.getLogger("rolltree.compat")


def setup_client(config: Any) -> Any:
    """Return an `AsyncOpenAI` as a `ClientConfig` says.

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
    kinds = {kind.__name__: kind for kind in DefaultAsyncHttpxClient.__mro__}
    httpx: Any = importlib.import_module(kinds["AsyncClient"].__module__.partition(".")[0])
    limits = httpx.Limits(
        max_connections=config.max_connections,
        max_keepalive_connections=config.max_keepalive_connections,
    )
    http_client = httpx.AsyncClient(
        limits=limits,
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

    Where there is no such file, or it has no `ENDPOINTS`, a warning says so and there are none.
    """
    path = Path(endpoints_path)
    file = path / "endpoints.py" if path.is_dir() else path
    try:
        return dict(_module_of(file).ENDPOINTS)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        logger.warning(
            "there is no endpoint registry at %s (%s). Name the model (-m), the base URL (-b) and "
            "the variable with the API key (-k).",
            endpoints_path,
            error,
        )
        return {}


def _module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("endpoints", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    found = results["metadata"]
    print("--- Evaluation ---")
    print(f"Environment: {found['env_id']}")
    print(f"Model: {found['model']}")
    print(f"Provider: {found['base_url']}")
    print(f"Examples: {found['num_examples']}")
    print(f"Rollouts per example: {found['rollouts_per_example']}")
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
        _print_values(name, values, found["rollouts_per_example"])


def _print_values(name: str, values: Sequence[float | None], num_trials: int) -> None:
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else 0.0
    spread = statistics.pstdev(known) if known else 0.0
    print(f"{name}: avg - {mean:.3f}, std - {spread:.3f}")
    for trial in range(num_trials):
        shown = [None if value is None else round(value, 3) for value in values[trial::num_trials]]
        print(f"r{trial + 1}: {shown}")
