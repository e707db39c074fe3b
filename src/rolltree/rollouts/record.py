"""Encodes rollout results as rows of the store, exactly, in O(unique tokens) of space.

There is one row per trajectory: columns for queries, the token tree as bytes, and a JSON record
that has every message once and every step as references (`message_table`, `record_steps`).
`decode` reads it. In addition to what `record_steps` names, these are left out on purpose:

- values with behaviour (a game, a sandbox): `store.Opaque` keeps only the name of their type;
- secrets in error texts and in pass-through sampling fields.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rolltree._helpers.redact import redact
from rolltree._helpers.tasks import run_shielded
from rolltree.rollouts.decode import VERSION
from rolltree.rollouts.message_table import MessageTable
from rolltree.rollouts.record_steps import trajectory_data
from rolltree.store import Run, StoredRollout, dumps, loads
from rolltree.tokens import StepTokens, TokenTree, Trajectory, peek
from rolltree.values.errors import TokenError, error_kind
from rolltree.values.state import UnscoredSnapshot
from rolltree.values.types import (
    ErrorRecord,
    RolloutRequest,
    RolloutResult,
    SamplingParams,
    State,
    TrajectoryStep,
)

if TYPE_CHECKING:
    from rolltree.rollouts.engine import RolloutEngine

Stored = tuple[RolloutResult, list[StoredRollout]]
"""A stored result, and its rows without their blobs."""


@runtime_checkable
class StoringEngine(Protocol):
    """An engine that stores results itself, before it yields them."""

    def run_stored(
        self,
        requests: Iterable[RolloutRequest],
        run: Run | None,
        *,
        replace_failed: bool,
        replaced: Collection[str],
    ) -> AsyncGenerator[list[Stored], None]:
        """Run requests and yield stored results; see the function `run_stored`."""
        ...


_STATE_APART = ("input", "trajectory", "completion", "error")
# Exceptions as data, whose texts may name secrets: URLs, headers.
_ERRORS = ("environment_errors", "scoring_errors", "tool_errors")
# What can be stored of these is in the request.
_NOT_STORED = ("client", "model", "sampling_args")


def encode_result(result: RolloutResult, *, blobs: bool = True) -> list[StoredRollout]:
    """Return one row per trajectory, or a single row if the result has no trajectory.

    `run.add_rollouts(encode_result(result))` stores a result atomically. Without `blobs` the rows
    have only their columns, as `run.rollouts(blobs=False)` reads them, in a fraction of the time.
    """
    states: Sequence[State | None] = result.states or (None,)
    return [_encode(result, index, state, blobs) for index, state in enumerate(states)]


async def run_stored(
    engine: RolloutEngine,
    requests: Iterable[RolloutRequest],
    run: Run | None,
    *,
    replace_failed: bool = False,
    replaced: Collection[str] = (),
) -> AsyncGenerator[list[Stored], None]:
    """Run requests, store each result as it finishes, and then yield it with its light rows.

    A thread encodes the results and writes each batch in one transaction. A write that has begun
    is finished even if this is cancelled. Without a `run` nothing is stored. `replace_failed` and
    `replaced` are passed to `Run.add_rollouts`.
    """
    if isinstance(engine, StoringEngine):
        own = engine.run_stored(requests, run, replace_failed=replace_failed, replaced=replaced)
        async with aclosing(own) as stored:
            async for pairs in stored:
                yield pairs
        return
    async with aclosing(engine.run_ready(requests)) as batches:
        async for batch in batches:
            # Encoding and SQLite would block the event loop, which all other episodes need.
            store = asyncio.to_thread(_store, batch, run, replace_failed, replaced)
            # A write that has begun is finished, and its end awaited, before a cancellation goes
            # on: the caller must not close the run while a thread still writes to it.
            yield list(zip(batch, await run_shielded(store), strict=True))


def _store(
    batch: Sequence[RolloutResult],
    run: Run | None,
    replace_failed: bool,
    replaced: Collection[str],
) -> list[list[StoredRollout]]:
    encoded = [encode_result(result, blobs=run is not None) for result in batch]
    if run is not None:
        # One transaction per batch: a kill leaves all of it or nothing.
        together = (row for rows in encoded for row in rows)
        run.add_rollouts(together, replace_failed=replace_failed, replaced=replaced)
    return [[replace(row, record=b"", tokens=b"") for row in rows] for rows in encoded]


def _encode(result: RolloutResult, index: int, state: State | None, blobs: bool) -> StoredRollout:
    request, error = result.request, result.error
    columns: dict[str, Any] = {
        "request_id": request.request_id,
        "trajectory_index": index,
        "num_trajectories": max(1, len(result.states)),
        "group_id": request.group_id,
        "index_in_group": request.index_in_group,
        "phase": request.phase,
        "train_step": request.train_step,
        "env_id": request.env_id,
        "example_id": request.input.get("example_id"),
        "task": _task_text(request.input.get("task")),
        "num_attempts": result.num_attempts,
        "status": "ok" if error is None else "error",
        "error_type": None if error is None else error.type,
        "error_phase": None if error is None else error.phase,
        "is_completed": False,
        "input": {key: value for key, value in request.input.items() if key != "prompt"},
        "errors": () if error is None else (error.as_dict(),),
    }
    trajectory = Trajectory() if state is None else _as_trajectory(state.get("trajectory"))
    if state is not None:
        columns |= _state_columns(state, trajectory, columns)
    row = StoredRollout(**columns)
    if not blobs:
        return row
    table = MessageTable()
    asked = request_data(request, table)
    record: dict[str, Any] = {
        "version": VERSION,
        "request": asked,
        "error": None if error is None else redact(error.as_dict()),
        "state": None,
    }
    if state is not None:
        record["state"] = _state_data(state, trajectory, asked["input"], table)
    # The table is complete only after the record has been made, and is written first for the
    # reader; joined as text, because its messages are JSON already.
    text = f'{{"table":{table.to_json()},{dumps(record)[1:]}'
    tokens = b"" if state is None else trajectory.tree.to_bytes()
    return replace(row, record=text.encode(), tokens=tokens)


def _state_columns(
    state: State, trajectory: Trajectory, request_columns: Mapping[str, Any]
) -> dict[str, Any]:
    timing: Mapping[str, Any] = state.timing or {}
    extras = [peek(step, "extras") or {} for step in trajectory]
    agents = (_text(extra.get("agent")) for extra in extras)
    tree = trajectory.tree
    handles = [trajectory.call_of(index) for index in range(len(trajectory))]
    calls = [call for call in handles if call is not None]
    ranges = [tree.value_range("version", call) for call in calls]
    versions = [int(version) for each in ranges if each is not None for version in each]
    # The tree has the sizes of calls with ids; for the others, the server's counts are used.
    sizes = [
        (_count(extra, "num_prompt_tokens"), _count(extra, "num_completion_tokens"))
        if call is None
        else (tree.prompt_len(call), tree.num_sampled(call))
        for call, extra in zip(handles, extras, strict=True)
    ]
    error = state.error
    own: list[Mapping[str, Any]] = []
    task = state.get("task")
    if error is not None:
        # An environment may put any object under `error`; the row gets its text.
        loose = {"type": type(error).__name__, "message": str(error), "phase": "environment"}
        loose["kind"] = error_kind(error) if isinstance(error, BaseException) else "episode"
        own = [error.as_dict() if isinstance(error, ErrorRecord) else loose]
    raised = {**(state.get("environment_errors") or {}), **(state.get("scoring_errors") or {})}
    # A delegated rollout's failure is listed in `errors`, but the episode has not failed.
    status_of = [] if state.parent_rollout is not None else own
    return {
        "agent": state.agent or next((name for name in agents if name not in (None, "")), ""),
        "parent_rollout": state.parent_rollout,
        # Of a rollout that nobody delegated it is the environment's own word, and may be anything.
        "depth": int(state.get("depth") or 0) if state.parent_rollout is not None else 0,
        "task": _task_text(task) or request_columns["task"],
        "reward": _number(state.reward),
        "status": "error" if status_of else request_columns["status"],
        "error_type": status_of[0]["type"] if status_of else request_columns["error_type"],
        "error_phase": status_of[0]["phase"] if status_of else request_columns["error_phase"],
        "errors": (
            *(own or request_columns["errors"]),
            *(
                {"function": name, **_without_repeated_traceback(item, own)}
                for name, item in raised.items()
            ),
        ),
        "stop_condition": state.stop_condition,
        "is_completed": bool(state.is_completed),
        "terminated": bool(state.terminated),
        "truncated": bool(state.truncated),
        "truncation_reason": state.truncation_reason,
        "finish_reason": _text(extras[-1].get("finish_reason")) if extras else None,
        "num_calls": len(trajectory),
        "num_prompt_tokens": sum(n for n, _ in sizes),
        "num_completion_tokens": sum(n for _, n in sizes),
        "num_unique_tokens": tree.num_tokens,
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        "generation_ms": _number(timing.get("generation_ms")) or 0.0,
        "scoring_ms": _number(timing.get("scoring_ms")) or 0.0,
        "total_ms": _number(timing.get("total_ms")) or 0.0,
        "started_at": _number(timing.get("start_time")),
        "metrics": dict(state.metrics or {}),
    }


def _task_text(task: Any) -> str:
    """Return the text of a task, which an environment may have made anything."""
    # As it will be read again, so that column and record agree.
    read = task if type(task) is str else loads(dumps(task))
    return "" if read is None else str(read)


def _without_repeated_traceback(
    error: Mapping[str, Any], own: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a function's error, without its traceback if the rollout's own error has the same."""
    if any(each.get("traceback") == error.get("traceback") for each in own):
        return {name: value for name, value in error.items() if name != "traceback"}
    return error


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> float | None:
    try:
        return None if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _count(extra: Mapping[str, Any], name: str) -> int:
    number = _number(extra.get(name))
    return int(number) if number is not None and math.isfinite(number) else 0


# -- requests ------------------------------------------------------------------------------------


def request_data(request: RolloutRequest, table: MessageTable) -> dict[str, Any]:
    """Return a request as data, without secrets; its messages are added to `table`."""
    data = {name: getattr(request, name) for name in RolloutRequest.__dataclass_fields__}
    asked = request.sampling
    data["sampling"] = {name: getattr(asked, name) for name in SamplingParams.__dataclass_fields__}
    data["sampling"]["extra"] = redact(dict(asked.extra)) if asked.extra else {}
    data["input"] = _input_data(request.input, table)
    return data


def _input_data(value: Mapping[str, Any], table: MessageTable) -> dict[str, Any]:
    fields = {key: item for key, item in value.items() if key != "prompt"}
    return {"fields": fields, "prompt": table.add(value.get("prompt")), "has": "prompt" in value}


# -- states --------------------------------------------------------------------------------------


def _as_trajectory(value: Any) -> Trajectory:
    """Return a trajectory whose tokens are all in its own tree; `value` is not changed.

    Inconsistent tokens stay in their step as they are. A tree is kept even if it has calls
    of other steps (because the value is a slice, or an answer of a session was not recorded).
    """
    steps: Sequence[TrajectoryStep] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Trajectory) and all(
        value.call_of(index) is not None or peek(step, "tokens") is None
        for index, step in enumerate(steps)
    ):
        return value
    # Rebuilt from a copy of each step: an environment may still hold the originals.
    trajectory = Trajectory()
    for step in steps:
        copied: Any = dict(step)
        tokens: Any = copied.get("tokens")
        try:
            if isinstance(tokens, StepTokens):
                copied["tokens"] = _graft(tokens, trajectory.tree)
            trajectory.append(copied)
        except TokenError:
            copied["tokens"] = None
            trajectory.append(copied)
            copied["tokens"] = tokens
    return trajectory


def _graft(tokens: StepTokens, tree: TokenTree) -> StepTokens:
    """Copy one call, with its logprobs, versions and streams, into `tree`."""
    grafted = StepTokens(tree, tree.copy_call(tokens.tree, tokens.call))
    for key in tokens.assigned:
        grafted[key] = tokens[key]
    return grafted


def _state_data(
    state: State, trajectory: Trajectory, request_input: dict[str, Any], table: MessageTable
) -> dict[str, Any]:
    # Copied in one go: a task that an environment left behind may still change the state.
    own = {key: value for key, value in dict.copy(state).items() if key not in _NOT_STORED}
    error = own.get("error")
    data: dict[str, Any] = {
        "has": [key for key in _STATE_APART if key in own],
        "fields": {
            # Without what an environment put there and nobody can read.
            key: redact(loads(dumps(value))) if key in _ERRORS else value
            for key, value in own.items()
            if key not in _STATE_APART
        },
        "completion": table.add(own.get("completion")),
        "error": (
            {"record": redact(error.as_dict())}
            if isinstance(error, ErrorRecord)
            else {"value": redact(error)}
        ),
        "steps": trajectory_data(trajectory, table),
    }
    if state.unscored is not None:
        data["played"] = _unscored_data(state, state.unscored)
    source = own.get("input")
    if isinstance(source, Mapping):
        found = _input_data(source, table)
        # Nearly every state has the unchanged row of its request, which is stored once.
        data["input"] = None if dumps(found) == dumps(request_input) else found
    return data


def _unscored_data(state: State, before: UnscoredSnapshot) -> dict[str, Any]:
    """Return the keys that scoring added and the values before scoring; None is left out."""
    data: dict[str, Any] = {
        "added": sorted(dict.keys(state) - before.keys, key=dumps),
        "reward": before.reward,
        "metrics": before.metrics,
        "has_step_rewards": before.has_step_rewards,
    }
    if any(reward is not None for reward in before.step_rewards):
        data["step_rewards"] = before.step_rewards
    return {name: value for name, value in data.items() if value is not None and value != []}
