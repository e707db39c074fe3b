"""What is played: the published environments, and the probes of `environments/`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("ROLLTREE_PEERS") or HERE / "peers").resolve()
"""Where other projects lie; docs/compat.md says how to make such a folder."""
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
        probe: "module:function", from the base URL to a result, in the place of an environment.
    """

    name: str
    environment: str
    folder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    script: str = "solver"
    inputs: tuple[int, ...] = ()
    probe: str = ""
    is_published: bool = False


CASES: dict[str, Case] = {}


def published(environment: str, name: str = "", **fields: Any) -> None:
    """Add a published environment."""
    name = name or environment
    CASES[name] = Case(name, environment, str(PUBLISHED / environment), is_published=True, **fields)


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
    settings={"num_examples": 8, "rollouts_per_example": 1, "max_concurrent": 1},  # one question
    script="wordle",
)


def own(environment: str, kind: str, name: str = "", arguments: Any = None, **fields: Any) -> None:
    """Add one of our environments, by its file and the function that makes it."""
    name = "_".join(part for part in (environment, kind, name) if part)
    made = {"kind": kind, **(arguments or {})}
    CASES[name] = Case(name, environment, str(HERE / "environments"), made, **fields)


_FEW = {"num_examples": 3}
# What asks the same again is alone: else who comes first decides how often a request has come.
_ALONE = {"num_examples": 3, "rollouts_per_example": 1}
_WITH_TOKENS = {"num_examples": 3, "sampling_args": {"max_tokens": 40, **TOKENS}}

own("turns", "hooked", settings={"state_columns": ["notes"]})
own("turns", "hooked", "no_limit", {"max_turns": -1, "hints": 3})
own("turns", "hooked", "tokens", settings=_WITH_TOKENS)
own("turns", "hooked", "max_seq_len", {"max_seq_len": 130}, settings=_WITH_TOKENS)
own("turns", "hooked", "short_seq_len", {"max_seq_len": 30}, settings=_WITH_TOKENS)
own("turns", "hooked", "overlong", script="overlong", settings=_FEW)
own("turns", "hooked", "broken", script="broken", settings=_FEW)
own("turns", "hooked", "one_at_a_time", settings={"max_concurrent": 1, "num_examples": 3})
own("turns", "own_rollout")
own("turns", "edits", settings=_WITH_TOKENS)
own("turns", "plain_lists", settings=_WITH_TOKENS)
own("turns", "asks_thrice")
own("turns", "own_completed")
own("turns", "own_completed", "without_limit", {"max_turns": -1}, settings=_FEW)
own("turns", "own_steps")
own("turns", "own_steps", "tokens", settings=_WITH_TOKENS)
own("turns", "spec_text")
own("turns", "spec_text", "overlong", script="overlong", settings=_FEW)
own("turns", "game")
own("turns", "stopped", settings=_FEW)
own("turns", "forgets", settings={"rollouts_per_example": 1})
own("turns", "hooked", "flaky", script="flaky", settings={"rollouts_per_example": 1})
own("turns", "empty")
own("turns", "second_model", settings=_FEW)
own("turns", "raises", settings=_FEW)
own("turns", "raises", "once", {"row": 1}, settings=_ALONE)
for _answer in ("pair", "nothing", "text", "message"):
    own("turns", "returns", _answer, {"answer": _answer}, settings=_FEW)
own("turns", "returns_unsent", "message", {"answer": "message"}, settings=_ALONE)
own("turns", "returns_unsent", "pair", {"answer": "pair"}, settings=_ALONE)
own("turns", "reads_state", settings=_WITH_TOKENS)
own("turns", "reads_state", "info", {"info": True}, settings={**_FEW, "rollouts_per_example": 1})
own("turns", "completes", script="writer", inputs=(0, 1, 2, 3))
own("turns", "completes", "evaluated", script="writer")
own("turns", "completes", "tokens", script="writer", settings=_WITH_TOKENS)

for _kind in (
    "typed",
    "dicts",
    "typed_dict",
    "formatted",
    "logged",
    "wallet",
    "no_tools",
    "plain_tools",
    "settable",
):
    own("calls", _kind, settings={"num_examples": -1})
own("calls", "typed", "tokens", settings=_WITH_TOKENS)
own("calls", "tools_in_info")
own("calls", "completion_tools", script="writer")
own("calls", "shell")

for _kind in (
    *("kinds", "partial", "nameless", "appended", "same_names", "in_order", "groups", "bonus"),
    *("rubric_group", "no_funcs", "default_rubric", "math", "replaced", "judged_by_default"),
    *("judge_replaced", "judge_own", "judge_bad_prompt", "judge_objects", "judge_fails"),
):
    own("scored", _kind)
own("scored", "judged")
own("scored", "judged", "sync", {"client": "sync"})
own("scored", "judged", "own_prompt", {"prompt": "Only {response}: yes or no?"})
own("scored", "judged", "sampling", {"sampling": {"max_tokens": 5, "top_p": None, "n": 1}})
own("scored", "judged", "no_limit", {"sampling": {"max_tokens": None}})
own("scored", "judged", "parser", {"parser": True})
for _kind in ("xml", "think", "maybe", "plain"):
    own("scored", "parsers", _kind, {"kind_of": _kind}, settings={"num_examples": -1})

for _kind in (
    *("prompts", "prompts_with_system", "few_shot", "text_ids", "no_answer", "infos", "json_infos"),
    *("eval_only", "nothing", "numbers", "pictures", "audio", "completion_with_system"),
    *("wrong_rubric", "mapped", "no_question", "own_format"),
):
    own("data_shapes", _kind)
own("data_shapes", "completion", script="writer")

for _kind in ("pair", "named", "nested", "wrong_names", "none", "only_eval", "routed"):
    own("mixed", _kind, settings={"num_examples": -1})


for _kind in ("code", "gym", "gyms", "examples", "mixture", "remote"):
    own("libraries", _kind)
own("libraries", "examples", "math", {"name": "math", "split": "test"})
own("libraries", "examples", "gpqa", {"name": "gpqa_main"})
own("libraries", "mixture", "numbered", inputs=(0, 4, 5, 7, 6, 0))
own("libraries", "continued", "numbered", script="writer", inputs=(0, 1, 2, 0))
own(
    *("libraries", "game"),
    settings={"num_examples": 5, "rollouts_per_example": 1, "max_concurrent": 1},
    script="wordle",
)


def probe(function: str, module: str = "probes") -> None:
    """Add a probe of a module."""
    CASES[function] = Case(function, "", str(HERE), probe=f"{module}:{function}")


for _name in (
    *("xml_parser", "other_parsers", "text_helpers", "example_data", "tool_schemas"),
    *("decorators", "states_by_hand", "generate_forms", "saved_results", "results_by_hand"),
    *("synchronous", "by_hand", "datasets_of", "logged", "configs", "endpoints", "command_line"),
    *("errors_of_load", "attributes_of_response", "failing", "defects"),
):
    probe(_name)
for _name in (
    *("completed", "begun", "responses", "clients", "rubrics"),
    *("steps", "tools", "scored", "abstract"),
):
    probe(f"{_name}_by_hand", "hand_probes")

own("edits", "edited", settings=_FEW)
own("edits", "edited", "tokens", settings=_WITH_TOKENS)
own("edits", "held", settings=_WITH_TOKENS)
own("edits", "several_calls", settings=_ALONE)
own("edits", "several_calls", "tokens", settings={**_WITH_TOKENS, **_ALONE})
own("edits", "one_turn_asks", settings=_ALONE)
own("edits", "own_sampling")
own("edits", "own_sampling", "two", settings={"sampling_args": {"n": 2}, **_ALONE})
own("edits", "own_sampling", "given", settings={"sampling_args": {"extra_body": {"c": 3}}})
for _name, _arguments in (
    ("list", "[1, 2]"),
    ("text", "no JSON"),
    ("number", "3"),
    ("good", '{"a": 4}'),
):
    for _stateful in (False, True):
        _case = f"{_name}_stateful" if _stateful else _name
        _given = {"arguments": _arguments, "stateful": _stateful}
        own("edits", "spoiled", _case, _given, settings=_ALONE)

for _kind in (
    *("direct", "around", "deep", "old", "sync_hooks", "sync_stop", "unfinished", "process"),
    *("shared", "submits", "shop", "grouped", "pending", "nudged"),
):
    own("overrides", _kind, settings=_FEW)
own("overrides", "shop", "enum", {"kind_of": "enum"})
own("overrides", "shop", "model", {"kind_of": "model"})
own("overrides", "submits", "tokens", settings=_WITH_TOKENS)
