"""Every way in which rolltree's `verifiers` is meant to differ: the rows of docs/compat.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seen:
    """Where a difference shows: fields whose whole path matches, in cases whose name matches.

    `holds` says whether a pair of values is the difference that is meant.
    """

    path: str
    holds: Callable[[Any, Any], bool] = lambda real, ours: True
    cases: str = ".*"


class Difference:
    """One row of the table: what verifiers does, what happens here, and where it shows."""

    def __init__(self, verifiers: str, here: str, *seen: Seen) -> None:
        self.verifiers = verifiers
        self.here = here
        self.seen = seen

    def covers(self, case: str, path: str, real: Any, ours: Any) -> bool:
        """Return whether this row explains a difference."""
        return any(
            re.fullmatch(seen.cases, case)
            and re.fullmatch(seen.path, path)
            and seen.holds(real, ours)
            for seen in self.seen
        )


def _added(real: Any, ours: Any) -> bool:
    return real == "<missing>"


def _more(real: Any, ours: Any) -> bool:
    return isinstance(real, list) and isinstance(ours, list) and set(real) <= set(ours)


def _numbers(real: Any, ours: Any) -> bool:
    return isinstance(real, float) and isinstance(ours, float)


def _worded(real: Any, ours: Any) -> bool:
    return "<missing>" not in (real, ours) and isinstance(ours, str)


def _outcome(cases: str) -> Seen:
    """Return where a case that fails on one side differs from one that does not."""
    return Seen(r"requests|result\.(load|environment|evaluate|results|error|text)", cases=cases)


_STATE = r"(.*\.)?(state|before|played|again|rollout|keywords|group\[\d+\])"
_STEP = rf"{_STATE}\.trajectory\[\d+\]"
_MORE_KEYS = "error|seed|terminated|truncated|truncation_reason|has_step_rewards|cleaned_up"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "one model call, hook or `score_group` that raises aborts `generate`; what the other "
        "rollouts did is lost",
        'that rollout (or group) has `state["error"]` and the reward None, the others count; '
        "a hook that raises after an answer ends its rollout, which is scored; `generate` raises "
        "if all have failed",
        _outcome(
            "turns_hooked_flaky|turns_raises_once|overrides_pending|turns_returns_unsent_pair"
        ),
    ),
    Difference(
        "`@cleanup` methods do not run when a model call fails",
        "they run",
        Seen(r"result\.cleaned after a failure"),
    ),
    Difference(
        "a reward function that raises, or returns no number, scores 0.0, and only the log says so",
        '`state["scoring_errors"]` holds the error and its traceback, too; a group function '
        "that returns too few scores, which aborts `generate` there, counts as one that raises",
        Seen(rf"{_STATE}\.scoring_errors", _added),
    ),
    Difference(
        "a reward function without a name (a `partial`) is an AttributeError once it has scored",
        "its metric has the name of what it calls",
        _outcome("scored_nameless"),
    ),
    Difference(
        "in a `RubricGroup` advantages are those of its last rubric, the steps' rewards and "
        "advantages those of its first",
        "they are those of the sums",
        Seen(
            rf"{_STATE}\.advantage|{_STEP}\.(reward|advantage)",
            _numbers,
            "calls_typed.*|scored_rubric_group|scored_replaced|states_by_hand|wiki_search|"
            "math_python|libraries_code",
        ),
        Seen(r"result\.score_group \w+\.steps\[\d\]", _numbers, "scored_by_hand"),
    ),
    Difference(
        "a stop condition that holds before the first turn is an IndexError, an `is_completed` "
        "that returns True by itself a KeyError",
        "the rollout ends with the messages so far",
        _outcome("turns_stopped|turns_own_completed_without_limit"),
    ),
    Difference(
        "`@stop` methods and `env_response` must be asynchronous",
        "they may be plain functions",
        _outcome("overrides_sync_hooks|overrides_sync_stop"),
    ),
    Difference(
        "an environment that rewrites history to less than the row's prompt has an empty "
        "`completion`",
        "`completion` has the messages that were exchanged",
        Seen(r"result\.results\.rows\[\d+\]\.(state\.)?completion", cases="turns_forgets"),
    ),
    Difference(
        "`oai_tools` in a row's `info` are ignored",
        "they are offered, and take precedence over the environment's",
        Seen(".*", cases="calls_tools_in_info"),
    ),
    Difference(
        "a tool with an argument of type `dict` or `TypedDict`, or with `**kwargs`, is refused",
        "it works",
        _outcome("calls_dicts|calls_typed_dict"),
        Seen(r"result\.(keywords|merge|move)(\..*)?", cases="tool_schemas"),
    ),
    Difference(
        "`EnvGroup` refuses an environment that only has evaluation data",
        "it takes it",
        _outcome("mixed_only_eval"),
    ),
    Difference(
        "`generate` fails on rows without `example_id` (so does `evaluate` with "
        '`message_type="completion"`), on columns, and on a chat prompt that is a string',
        "rows are numbered, columns are rows, a string is the user's message",
        _outcome("continuation_quality"),
        Seen(r"result\.(no ids|dict|text)(\..*)?|requests.*", cases="generate_forms"),
    ),
    Difference(
        "sampling arguments with `n=2` sample two answers, and the first is used",
        "a ValueError: ask for more rollouts",
        _outcome("edits_own_sampling_two"),
    ),
    Difference(
        "`get_dataset(seed=...)` shuffles the data set for all later callers",
        "it shuffles what it returns",
        Seen(r"result\.shuffled for everybody"),
    ),
    Difference(
        "an environment can only be created in the main thread",
        "in any thread",
        Seen(r"result\.in a thread(\..*)?"),
    ),
    Difference(
        "`in`, `update` and `copy` of a state do not know the fields of its input",
        "they do",
        Seen(r"result\.state\.(in|update|copy)(\W.*)?", cases="states_by_hand"),
        Seen(r".*\.report\.prompt in", cases="turns_reads_state.*"),
    ),
    Difference(
        "a state has the keys that 0.1.8 writes",
        "it also has `error`, `seed`, `terminated`, `truncated`, `truncation_reason`, "
        "`has_step_rewards` and `cleaned_up`, and at the end always `advantage` and "
        "`stop_condition`, None if 0.1.8 has none",
        Seen(rf"{_STATE}\.({_MORE_KEYS})", _added),
        Seen(rf"{_STATE}\.(report\.)?keys", _more),
        Seen(
            rf"{_STATE}\.(advantage|stop_condition)",
            lambda real, ours: real == "<missing>" and ours is None,
        ),
    ),
    Difference(
        "a step's `extras` are empty",
        "they hold what the engine knows of the call: its id, turn, policy versions, token counts",
        Seen(rf"{_STEP}\.extras\.\w+", _added),
    ),
    Difference(
        "an example data set that cannot be fetched, or a split that it does not have, raises what "
        "the `datasets` package raises",
        "a ValueError that says what to put where",
        Seen(r"result\.no split\.error"),
    ),
    Difference(
        "a call of a `StatefulToolEnv`'s tool whose arguments are not JSON raises",
        "the model is told: a failed rollout has no reward, and a policy could learn to fail",
        _outcome("edits_spoiled_text_stateful"),
    ),
    Difference(
        "a `ToolEnv` asserts that the message that it answers has tool calls",
        "one without calls gets no answer, for the same reason",
        Seen(r"result\.\w+ (no calls|calls are none)", cases="tools_by_hand"),
    ),
    Difference(
        "`update_tool_args` must be a plain function",
        "it may be asynchronous",
        Seen(r"result\.Later (one|two)\[\d\]\.content", cases="tools_by_hand"),
    ),
    Difference(
        "`remove_tool` of a `StatefulToolEnv` is a KeyError for a tool that the constructor got",
        "the tool is removed",
        Seen(r"result\.(Stateful|Later) removes", cases="tools_by_hand"),
    ),
    Difference(
        "a custom `Environment` must define `setup_state`",
        "it may leave it out",
        Seen(r"result\.NoSetup", cases="abstract_by_hand"),
    ),
    Difference(
        "`score_rollout` leaves the rewards of the steps as they are, and a state without `timing` "
        "cannot be scored",
        "steps without a reward get the rollout's, as with `score_group`; it can",
        Seen(r"result\.score_rollout \w+\.steps\[\d\]", cases="scored_by_hand"),
        Seen(r"result\.no timing\.\w+", cases="scored_by_hand"),
    ),
    Difference(
        "`init_state` asks for a client and a model; `generate` does not know `score_rollouts`",
        "both may be left out; `score_rollouts=False` plays and does not score",
        Seen(r"result\.(alone|score_rollouts)(\..*)?|requests.*", cases="begun_by_hand"),
        Seen(r".*\.init_state\.parameters\.(client|model)\[1\]", cases="surface"),
    ),
    Difference(
        "`GenerateOutputs` and `GenerateMetadata` are TypedDicts, `State` annotates its keys",
        "they are dicts whose keys are attributes, too; the keys of a `State` are in its docstring",
        Seen(r".*\.(Generate\w+)\.(required|bases)|.*\.State\.fields", cases="surface"),
    ),
    Difference(
        "`envs.sandbox_env` has the classes of `prime-sandboxes`, and cannot be imported without "
        "it; `utils.tool_utils` has `function_schema` of `openai-agents`",
        "without `prime-sandboxes` these are the classes of this machine's sandboxes; "
        "`function_schema` where `openai-agents` is installed",
        Seen(
            r"verifiers\.envs\.sandbox_env\.(APIClient|AdvancedConfigs|AsyncSandboxClient|"
            r"CreateSandboxRequest|SandboxClient)|.*\.function_schema",
            cases="surface",
        ),
    ),
    Difference(
        "`PythonEnv` has private members of its worker (`_WORKER_SCRIPT`, ...)",
        "these names do not exist",
        Seen(r".*\.PythonEnv\.members\._\w+|.*\._get_metadata_text", cases="surface"),
    ),
    Difference(
        "the modules of `scripts` have their templates, themes and imports as names; there are "
        "`scripts.setup`, `rl`, `prime_rl`, `train` and `tui`",
        "they have `main` and their own functions; the trainer's four and the terminal browser are "
        "missing",
        Seen(r"verifiers\.scripts\.(setup|rl|prime_rl|train|tui)", cases="surface"),
        Seen(
            r"verifiers\.scripts\.(eval|init|install)\.(\w+|\w+\.members\.[A-Z_]+)",
            cases="surface",
        ),
    ),
    Difference(
        "error messages",
        "the classes are the same; the messages differ, and say what to do",
        Seen(r".*\.text", _worded),
    ),
)
