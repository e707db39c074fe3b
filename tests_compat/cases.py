"""What is played: the published environments, and the probes of `environments/`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("ROLLTREE_PEERS", HERE.parent.parent / "shared" / "peers"))
PUBLISHED = PEERS / "verifiers-0.1.8.post2" / "environments"

TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}
"""Sampling arguments that make the server return token ids and logprobs."""


@dataclass(frozen=True)
class Case:
    """One environment with its arguments, or one probe.

    Attributes:
        arguments: `load_environment`'s; SERVER in them is the case's base URL, PYTHON the
            interpreter.
        settings: `evaluate`'s, over 5 examples with 2 rollouts each.
        script: which script answers.
        inputs: play these rows with `generate`, numbered, instead of `evaluate`.
        probe: a function from the base URL to a result, in the place of an environment.
    """

    name: str
    environment: str
    folder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    script: str = "solver"
    inputs: tuple[int, ...] = ()
    probe: Callable[[str], Any] | None = None


CASES: dict[str, Case] = {}


def published(environment: str, name: str = "", **fields: Any) -> None:
    """Add a published environment."""
    name = name or environment
    CASES[name] = Case(name, environment, str(PUBLISHED / environment), **fields)


_JUDGED = {"judge_base_url": "SERVER"}

published("continuation_quality", arguments=_JUDGED, script="writer")
published(
    "continuation_quality",
    "continuation_quality_numbered",
    arguments=_JUDGED,
    inputs=(0, 1, 2, 3, 0),
    script="writer",
)
published("doublecheck", settings={"num_examples": 8})
published("doublecheck", "doublecheck_tokens", settings={"sampling_args": {**TOKENS}})
published("gpqa", settings={"num_examples": -1})
published("gpqa", "gpqa_main", arguments={"use_diamond": False})
published("gsm8k", settings={"num_examples": 12, "rollouts_per_example": 3})
published(
    "gsm8k",
    "gsm8k_tokens",
    arguments={"num_train_examples": 5, "num_eval_examples": 6, "system_prompt": "Short."},
    settings={"sampling_args": {"max_tokens": 20, "temperature": 0.5, **TOKENS}},
)
published("math")
published("math_group", inputs=(0, 1, 2, 3, 0, 1, 1000, 1001, 1002, 1003, 1004, 1000))
published("math_python", settings={"num_examples": 3})
published(
    "mcp_env",
    arguments={
        "mcp_servers": [
            {
                "name": "words",
                "command": "PYTHON",
                "args": [str(HERE / "stand_ins" / "mcp_words.py")],
                "description": "words",
            }
        ]
    },
    settings={"rollouts_per_example": 6},
)
published("mmmu")
published("mmmu", "mmmu_wrong_subset", arguments={"subset": "Cooking"})
published("reasoning_gym_env", arguments={"num_train_examples": 10, "num_eval_examples": 10})
published(
    "reasoning_gym_env",
    "reasoning_gym_several",
    arguments={
        "gym": ["basic_arithmetic", {"name": "gcd", "weight": 2.0, "config": {}}],
        "num_train_examples": 6,
        "num_eval_examples": 6,
    },
)
published("reverse_text", settings={"num_examples": 10})
published("self_reward", arguments={"dataset_name": "someone/questions", "model_name": "judge"})
published("sentence_repeater", script="echo")
published("simpleqa", arguments=_JUDGED, settings={"num_examples": 10})
published(
    "tool_test",
    arguments={"num_train_examples": 10, "num_eval_examples": 8},
    settings={"num_examples": 8},
)
published("toxicity_explanation", arguments={**_JUDGED, "max_examples": 8})
published("wiki_search", arguments=_JUDGED, settings={"num_examples": 8})
published(
    "wordle",
    arguments={"num_train_examples": 6, "num_eval_examples": 8},
    settings={"num_examples": 4},
    script="wordle",
)
