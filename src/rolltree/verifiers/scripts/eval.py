"""`vf-eval`: evaluate a model on an environment, with the flags and files of verifiers 0.1.8."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from typing import Any

from rolltree._helpers.redact import remember
from rolltree.environments import eval_defaults
from rolltree.values.errors import ConfigError
from rolltree.verifiers.configs import ClientConfig, EvalConfig
from rolltree.verifiers.helpers import setup_logging
from rolltree.verifiers.results import load_endpoints, run_evaluation

logger = logging.getLogger("verifiers.scripts.eval")

DEFAULTS = {"num_examples": 5, "rollouts_per_example": 3}


def get_env_eval_defaults(env_id: str) -> dict[str, Any]:
    """Return `[tool.verifiers.eval]` of the environment's pyproject.toml, or {} on an error."""
    try:
        return dict(eval_defaults(env_id))
    except (ConfigError, ImportError, ValueError) as error:
        logger.debug("no evaluation defaults of %s: %s", env_id, error)
        return {}


def main() -> None:
    """Read the command line and evaluate."""
    asked = _parser().parse_args()
    setup_logging("DEBUG" if asked.verbose else os.getenv("VF_LOG_LEVEL", "INFO"))
    own = get_env_eval_defaults(asked.env_id)
    endpoint = load_endpoints(asked.endpoints_path).get(asked.model) or {
        "key": asked.api_key_var,
        "url": asked.api_base_url,
        "model": asked.model,
    }
    # Keys are masked in everything that is printed from here on.
    remember(os.getenv(endpoint["key"]) or "")
    if asked.save_to_hf_hub and not asked.save_results:
        print(
            "note: -H pushes what -s saves, and -s is missing; nothing is pushed", file=sys.stderr
        )
    # The flags have the names of the settings; those that are not given are the environment's.
    given = {name: value for name, value in vars(asked).items() if value is not None}
    settings = {
        **DEFAULTS,
        **own,
        **{name: given[name] for name in EvalConfig.model_fields if name in given},
        "model": endpoint["model"],
        "client_config": ClientConfig(
            api_key_var=endpoint["key"],
            api_base_url=endpoint["url"],
            extra_headers=_headers(asked.header or []),
        ),
        "sampling_args": _sampling(asked.sampling_args, asked.max_tokens, asked.temperature),
        "print_results": True,
    }
    config = EvalConfig(**settings)
    logger.debug("evaluation: %s", config)
    try:
        asyncio.run(run_evaluation(config))
    except Exception as error:  # the Hub's errors have no common base
        if asked.save_to_hf_hub and type(error).__module__.partition(".")[0] == "huggingface_hub":
            raise ConfigError(
                f"the results are saved, but could not be pushed to the Hugging Face Hub ({error})."
                " Log in with `hf auth login`, or leave -H out."
            ) from error
        if isinstance(error, ValueError | RuntimeError) and "nvironment" in str(error):
            raise ConfigError(str(error)) from error  # of load_environment
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vf-eval", description=__doc__)
    add = parser.add_argument
    add("env_id", help="environment: name of its installed package")
    add("-a", "--env-args", type=json.loads, default={}, help="its arguments, a JSON object")
    add("-p", "--env-dir-path", default="./environments", help="folder of local environments")
    add("-e", "--endpoints-path", default="./configs/endpoints.py", help="registry of endpoints")
    add("-m", "--model", default="gpt-4.1-mini", help="model, or its name in the registry")
    add("-k", "--api-key-var", default="OPENAI_API_KEY", help="variable with the API key")
    add("-b", "--api-base-url", default="https://api.openai.com/v1", help="base URL of the server")
    add("--header", action="append", help="extra HTTP header 'Name: Value'; repeatable")
    add("-n", "--num-examples", type=int, help="examples; default: the environment's, or 5")
    add("-r", "--rollouts-per-example", type=int, help="default: the environment's, or 3")
    add("-c", "--max-concurrent", type=int, default=32, help="most rollouts at once")
    add("--max-concurrent-generation", type=int, help="most model requests at once")
    add("--max-concurrent-scoring", type=int, help="most rollouts that are scored at once")
    add("-t", "--max-tokens", type=int, help="most tokens of an answer")
    add("-T", "--temperature", type=float, help="sampling temperature")
    add("-S", "--sampling-args", type=json.loads, help="sampling arguments, JSON; they win")
    add("-v", "--verbose", action="store_true", help="log more")
    add("-N", "--no-interleave-scoring", action="store_true", help="accepted; without effect")
    add("-C", "--state-columns", type=_names, default=[], help="state fields to save: a,b,c")
    add("-s", "--save-results", action="store_true", help="write results.jsonl and metadata.json")
    add("-f", "--save-every", type=int, default=-1, help="write them after every so many rollouts")
    add("-H", "--save-to-hf-hub", action="store_true", help="push them to the Hugging Face Hub")
    add("-D", "--hf-hub-dataset-name", default="", help="name of the data set there")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _sampling(
    given: dict[str, Any] | None, max_tokens: int | None, temperature: float | None
) -> dict[str, Any]:
    """Return the sampling arguments; -S overrides the other flags."""
    # The key is set even if it is None, as in verifiers' metadata.json.
    sampling = {"max_tokens": max_tokens, **(given or {})}
    if temperature is not None:
        sampling.setdefault("temperature", temperature)
    return sampling


def _headers(lines: list[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--header is {line!r}. Write it as 'Name: Value'.")
        headers[name] = value
        remember(value)
    return headers


if __name__ == "__main__":
    from rolltree.verifiers.scripts import messages

    messages(main)
