"""Every way in which rolltree's `verifiers` is meant to differ: the rows of docs/compat.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One row of the table.

    Attributes:
        verifiers: what verifiers 0.1.8 does; the first cell of the row.
        here: what happens here; the second cell.
        path: a pattern of the fields it explains; the whole path must match.
        holds: whether a pair of values is what the row says.
        cases: a pattern of the cases it may show in.
    """

    verifiers: str
    here: str
    path: str
    holds: Callable[[Any, Any], bool] = lambda real, ours: True
    cases: str = ".*"

    def covers(self, case: str, path: str, real: Any, ours: Any) -> bool:
        """Return whether this row explains a difference."""
        return bool(
            re.fullmatch(self.cases, case)
            and re.fullmatch(self.path, path)
            and self.holds(real, ours)
        )


def _added(real: Any, ours: Any) -> bool:
    return real == "<missing>"


def _more(real: Any, ours: Any) -> bool:
    return isinstance(real, list) and isinstance(ours, list) and set(real) <= set(ours)


def _less(real: Any, ours: Any) -> bool:
    return ours == "<missing>"


def _worded(real: Any, ours: Any) -> bool:
    return "<missing>" not in (real, ours) and isinstance(ours, str)


_OUTCOME = r"requests|result\.(load|environment|evaluate|results|error|text)"
"""Where a case that fails on one side differs from one that does not."""
_STATE = r"(.*\.)?(state|before|played|again|rollout|keywords|group\[\d+\])"
_STEP = rf"{_STATE}\.trajectory\[\d+\]"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "a state has the keys that 0.1.8 writes",
        "it also has `error`, `seed`, `terminated`, `truncated`, `truncation_reason`, "
        "`has_step_rewards` and `cleaned_up`, and None where 0.1.8 has no `advantage` or "
        "`stop_condition` at the end",
        rf"{_STATE}\.(error|seed|terminated|truncated|truncation_reason|has_step_rewards|cleaned_up)",
        _added,
    ),
    Difference(
        "a state has the keys that 0.1.8 writes",
        "it also has `error`, `seed`, `terminated`, `truncated`, `truncation_reason`, "
        "`has_step_rewards` and `cleaned_up`, and None where 0.1.8 has no `advantage` or "
        "`stop_condition` at the end",
        rf"{_STATE}\.keys",
        _more,
    ),
    Difference(
        "a step's `extras` are empty",
        "they hold what the engine knows of the call: its id, turn, policy versions, token counts",
        rf"{_STEP}\.extras\.\w+",
        _added,
    ),
    Difference(
        "a state has the keys that 0.1.8 writes",
        "it also has `error`, `seed`, `terminated`, `truncated`, `truncation_reason`, "
        "`has_step_rewards` and `cleaned_up`, and None where 0.1.8 has no `advantage` or "
        "`stop_condition` at the end",
        rf"{_STATE}\.(advantage|stop_condition)",
        lambda real, ours: real == "<missing>" and ours is None,
    ),
    Difference(
        "`@stop` methods and `env_response` must be asynchronous",
        "they may be plain functions, too",
        _OUTCOME,
        cases="overrides_sync_hooks|overrides_sync_stop",
    ),
    Difference(
        "messages of errors",
        "the same classes of errors, in words of their own that say what to do",
        r".*\.(text|trace)",
        _worded,
    ),
    Difference(
        "`oai_tools` in a row's `info` are ignored",
        "they are offered where the environment has no tools of its own",
        r".*",
        cases="calls_tools_in_info",
    ),
    Difference(
        "a stop condition that holds before the first turn ends in IndexError, an `is_completed` "
        "that returns True by itself in KeyError",
        "the rollout is over, with what has been said",
        _OUTCOME,
        cases="turns_stopped|turns_own_completed_without_limit",
    ),
    Difference(
        '`message_type="completion"` needs an `example_id` column, and fails without',
        "rows are numbered",
        _OUTCOME,
        cases="continuation_quality",
    ),
    Difference(
        "`EnvGroup` refuses an environment that only has evaluation data",
        "it takes it",
        _OUTCOME,
        cases="mixed_only_eval",
    ),
    Difference(
        "a reward function that raises scores 0 and leaves no trace but a line in the log",
        'it scores 0, and `state["scoring_errors"]` has the error',
        rf"{_STATE}\.scoring_errors",
        _added,
    ),
    Difference(
        "in a `RubricGroup` (every `ToolEnv`) the rewards and advantages of steps come from the "
        "first rubric, the advantage of the rollout from the last one",
        "they come from the sum",
        rf"{_STATE}\.advantage|{_STEP}\.(reward|advantage)",
        lambda real, ours: isinstance(real, float) and isinstance(ours, float),
        cases="calls_.*|mixed_.*|scored_rubric_group|scored_replaced|states_by_hand|wiki_search|"
        "tool_test|math_python|mcp_env",
    ),
    Difference(
        "one failed model call aborts `generate`, and what the other rollouts did is lost",
        'the rollout has `state["error"]` and the reward None, the others count; `generate` raises '
        "if all have failed",
        _OUTCOME,
        cases="turns_hooked_flaky",
    ),
    Difference(
        "an environment that rewrites history to less than the row's prompt gets an empty "
        "`completion`",
        "`completion` is what was said",
        r"result\.results\.rows\[\d+\]\.(state\.)?completion",
        cases="turns_forgets",
    ),
    Difference(
        "`get_dataset(seed=...)` shuffles the data set for everybody who asks later",
        "it shuffles what it returns",
        r"result\.shuffled for everybody",
    ),
    Difference(
        "an environment can only be made in the main thread",
        "in any",
        r"result\.in a thread(\..*)?",
    ),
    Difference(
        "`@cleanup` methods do not run when a model call fails",
        "they run",
        r"result\.cleaned after a failure",
    ),
    Difference(
        "`generate` with inputs that are no list or `Dataset`, or lack an `example_id`, is an "
        "UnboundLocalError or a KeyError",
        "columns are taken as rows, and rows are numbered",
        r"result\.(dict|no ids)(\..*)?|requests.*",
        cases="generate_forms",
    ),
    Difference(
        "an unknown split of an example data set is a KeyError",
        "a ValueError that names it",
        r"result\.no split\.error",
    ),
    Difference(
        "a tool with an argument of type `dict` or `TypedDict`, or with `**kwargs`, is refused",
        "it works",
        _OUTCOME,
        cases="calls_dicts|calls_typed_dict",
    ),
    Difference(
        "a reward function without a name (`functools.partial`) is an AttributeError",
        "it goes by the name of what it wraps",
        rf"{_OUTCOME}|result\.environment\.rubric\.funcs\[0\]",
        cases="scored_nameless",
    ),
    Difference(
        "a tool with an argument of type `dict` or `TypedDict`, or with `**kwargs`, is refused",
        "it works",
        r"result\.(keywords|merge|move)(\..*)?",
        cases="tool_schemas",
    ),
    Difference(
        "`in`, `update` and `copy` of a state do not know the fields of its input",
        "they do",
        r"result\.state\.(in|update|copy)(\W.*)?",
        cases="states_by_hand",
    ),
    Difference(
        "`from verifiers import *` fails where the trainer's packages are missing",
        "it leaves the trainer out",
        r"result\.all",
        lambda real, ours: set(ours) < set(real),
        cases="failing",
    ),
    Difference(
        "an example data set that cannot be fetched raises what the hub's client raises",
        "a ValueError that names the file to put where",
        r"result\.no split\.error",
        cases="example_data",
    ),
    Difference(
        "`in`, `update` and `copy` of a state do not know the fields of its input",
        "they do",
        r".*\.report\.prompt in",
        cases="turns_reads_state.*",
    ),
    Difference(
        "a state has the keys that 0.1.8 writes",
        "it also has `error`, `seed`, `terminated`, `truncated`, `truncation_reason`, "
        "`has_step_rewards` and `cleaned_up`",
        r".*\.report\.keys",
        _more,
        cases="turns_reads_state.*",
    ),
    Difference(
        "a prompt that is a string fails where messages are wanted",
        "it is the user's message",
        r"requests|result\.text\..*",
        cases="generate_forms",
    ),
)


def table() -> str:
    """Return the table of docs/compat.md."""
    rows = dict.fromkeys(f"| {row.verifiers} | {row.here} |" for row in DIFFERENCES)
    return "\n".join(["| verifiers 0.1.8 | here |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
