"""Rollout results to store rows and back, exactly, in O(unique tokens) of space.

One row per trajectory: columns for queries, the token tree as bytes, and a JSON record with every
message once and every step as references (`message_table`). Left out on
purpose:

- the raw response of a client that wraps another one, of which only identity and usage are kept:
  its text is in the completion, its ids and logprobs in the tree;
- values with behaviour (a game, a sandbox), of which `store.Opaque` keeps the type;
- secrets in error texts and in pass-through sampling fields, which are cut out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from rolltree.errors import StoreError, TokenError
from rolltree.redact import redact
from rolltree.rollouts.message_table import MessageReader, MessageTable, Reference
from rolltree.store import Run, StoredRollout, dumps, loads
from rolltree.tasks import uninterrupted
from rolltree.tokens import RecordedStep, StepTokens, TokenTree, Trajectory, peek
from rolltree.types import (
    ErrorRecord,
    FinishReason,
    ModelResponse,
    RolloutRequest,
    RolloutResult,
    SamplingParams,
    State,
    TrajectoryStep,
)

if TYPE_CHECKING:
    from rolltree.rollouts.engine import RolloutEngine

VERSION = 1
_RESPONSE_FIELDS = ("id", "model", "object", "created", "system_fingerprint", "usage")
_IN_EXTRAS = (
    *("finish_reason", "temperature", "call_id"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
_STEP_FIELDS = ("prompt", "completion", "response", "tokens", "reward", "advantage", "extras")
_STATE_APART = ("input", "trajectory", "completion", "error")
_NOT_STORED = ("client", "model", "sampling_args")  # the request has what of them is data


def encode_result(result: RolloutResult, *, blobs: bool = True) -> list[StoredRollout]:
    """Return one row per trajectory; one row without blobs' content when there is none.

    `run.add_rollouts(encode_result(result))` stores a result atomically. Without `blobs` the rows
    have their columns only, as `run.rollouts(blobs=False)` reads them, at a fraction of the time.
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
) -> AsyncGenerator[list[tuple[RolloutResult, list[StoredRollout]]], None]:
    """Run requests and yield results, as they finish, once they are stored; with their light rows.

    A thread encodes and writes, a batch in one transaction. A write that has begun is finished
    though this is cancelled. Without a `run` nothing is stored. `replace_failed` and `replaced` are
    `Run.add_rollouts`'.
    """
    async with aclosing(engine.run_ready(requests)) as batches:
        async for batch in batches:
            store = asyncio.to_thread(_store, batch, run, replace_failed, replaced)
            yield list(zip(batch, await uninterrupted(store), strict=True))


def _store(
    batch: Sequence[RolloutResult],
    run: Run | None,
    replace_failed: bool,
    replaced: Collection[str],
) -> list[list[StoredRollout]]:
    encoded = [encode_result(result, blobs=run is not None) for result in batch]
    if run is not None:
        together = (row for rows in encoded for row in rows)
        run.add_rollouts(together, replace_failed=replace_failed, replaced=replaced)
    return [[replace(row, record=b"", tokens=b"") for row in rows] for rows in encoded]


def decode_rollout(row: StoredRollout) -> RolloutResult:
    """Rebuild the result that one row holds: its request, its one state, its error.

    Raises:
        StoreError: the row was read without its blobs, or its record is not one of this version.
    """
    if not row.record:
        raise StoreError(
            f"rollout {row.request_id!r} was read without its record, so it has no messages. Read "
            "it with run.rollouts(blobs=True)."
        )
    try:
        return _decode(row)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(
            f"rollout {row.request_id!r} has a record that rolltree did not write "
            f"({type(error).__name__}: {error}), so its messages and tokens cannot be read. "
            "`rolltree export RUN FILE --light` writes its columns."
        ) from error


def _decode(row: StoredRollout) -> RolloutResult:
    record = loads(row.record)
    if record["version"] != VERSION:
        raise StoreError(
            f"rollout {row.request_id!r} has record version {record['version']}; this rolltree "
            f"reads version {VERSION}. Upgrade rolltree to read it."
        )
    messages = MessageReader(record["table"])
    request = _decode_request(record["request"], messages)
    states: tuple[State, ...] = ()
    if record["state"] is not None:
        states = (_decode_state(record["state"], request, row.tokens, messages),)
    return RolloutResult(request, states, _decode_error(record["error"]), row.num_attempts)


def decode_results(rows: Iterable[StoredRollout]) -> Iterator[RolloutResult]:
    """Rebuild whole results: adjacent rows of one request become one result.

    Rows come adjacent from `run.rollouts()`.
    """
    pending: RolloutResult | None = None
    for row in rows:
        result = decode_rollout(row)
        if pending is not None and pending.request.request_id == row.request_id:
            pending = replace(pending, states=(*pending.states, *result.states))
            continue
        if pending is not None:
            yield pending
        pending = result
    if pending is not None:
        yield pending


def export_line(row: StoredRollout) -> dict[str, Any]:
    """Return a row as one JSON line in the shape of spec 1: for `run.export(render=...)`.

    `trajectory` restates every step's prompt and token lists, so its size is O(T^2) in turns.
    """
    line = {name: getattr(row, name) for name in _EXPORTED}
    result = decode_rollout(row)
    line["prompt"] = result.request.input["prompt"]
    for state in result.states:
        line["prompt"] = state.get("prompt")
        line["completion"] = state.get("completion")
        line["trajectory"] = [
            {**step, "tokens": dict(step["tokens"].items()) if step["tokens"] else None}
            for step in state["trajectory"]
        ]
    return line


_EXPORTED = [
    name for name in StoredRollout.__dataclass_fields__ if name not in ("record", "tokens")
]


def _encode(result: RolloutResult, index: int, state: State | None, blobs: bool) -> StoredRollout:
    request, error = result.request, result.error
    row = StoredRollout(
        request_id=request.request_id,
        trajectory_index=index,
        num_trajectories=max(1, len(result.states)),
        group_id=request.group_id,
        index_in_group=request.index_in_group,
        phase=request.phase,
        train_step=request.train_step,
        env_id=request.env_id,
        example_id=request.input.get("example_id"),
        task=str(request.input.get("task", "")),
        num_attempts=result.num_attempts,
        status="ok" if error is None else "error",
        error_type=None if error is None else error.type,
        error_phase=None if error is None else error.phase,
        is_completed=False,
        input={key: value for key, value in request.input.items() if key != "prompt"},
        errors=() if error is None else (error.as_dict(),),
    )
    trajectory = Trajectory() if state is None else _as_trajectory(state.get("trajectory"))
    if state is not None:
        row = replace(row, **_columns(state, trajectory, row))
    if not blobs:
        return row
    table = MessageTable()
    request_data = _request_data(request, table)
    record: dict[str, Any] = {
        "version": VERSION,
        "request": request_data,
        "error": None if error is None else redact(error.as_dict()),
        "state": None,
    }
    if state is not None:
        record["state"] = _state_data(state, trajectory, request_data["input"], table)
    text = f'{{"table":{table.to_json()},{dumps(record)[1:]}'
    tokens = b"" if state is None else trajectory.tree.to_bytes()
    return replace(row, record=text.encode(), tokens=tokens)


def _columns(state: State, trajectory: Trajectory, row: StoredRollout) -> dict[str, Any]:
    timing = state.get("timing") or {}
    extras = [peek(step, "extras") or {} for step in trajectory]
    tree = trajectory.tree
    handles = [trajectory.call_of(index) for index in range(len(trajectory))]
    calls = [call for call in handles if call is not None]
    versions = [tree.versions(call) for call in calls if tree.num_sampled(call)]
    sizes = [
        (int(extra.get("num_prompt_tokens") or 0), int(extra.get("num_completion_tokens") or 0))
        if call is None
        else (tree.prompt_len(call), tree.num_sampled(call))
        for call, extra in zip(handles, extras, strict=True)
    ]
    error = state.get("error")
    own: list[Mapping[str, Any]] = []
    if error is not None:
        loose = {"type": type(error).__name__, "message": str(error), "phase": "environment"}
        own = [error.as_dict() if isinstance(error, ErrorRecord) else loose]
    scoring = state.get("scoring_errors") or {}
    # What failed in a delegated rollout is in `errors`; the episode has not failed by it.
    status_of = [] if state.get("parent_rollout") is not None else own
    return {
        "agent": str(
            state.get("agent") or next((e["agent"] for e in extras if e.get("agent")), "")
        ),
        "parent_rollout": state.get("parent_rollout"),
        "depth": int(state.get("depth") or 0),
        "task": str(state.get("task") or row.task),
        "reward": _number(state.get("reward")),
        "status": "error" if status_of else row.status,
        "error_type": status_of[0]["type"] if status_of else row.error_type,
        "error_phase": status_of[0]["phase"] if status_of else row.error_phase,
        "errors": (
            *(own or row.errors),
            *({"function": name, **item} for name, item in scoring.items()),
        ),
        "stop_condition": state.get("stop_condition"),
        "is_completed": bool(state.get("is_completed")),
        "terminated": bool(state.get("terminated")),
        "truncated": bool(state.get("truncated")),
        "truncation_reason": state.get("truncation_reason"),
        "finish_reason": extras[-1].get("finish_reason") if extras else None,
        "num_calls": len(trajectory),
        "num_prompt_tokens": sum(n for n, _ in sizes),
        "num_completion_tokens": sum(n for _, n in sizes),
        "num_unique_tokens": tree.num_tokens,
        "min_version": min((int(v.min()) for v in versions), default=None),
        "max_version": max((int(v.max()) for v in versions), default=None),
        "generation_ms": _number(timing.get("generation_ms")) or 0.0,
        "scoring_ms": _number(timing.get("scoring_ms")) or 0.0,
        "total_ms": _number(timing.get("total_ms")) or 0.0,
        "started_at": _number(timing.get("start_time")),
        "metrics": dict(state.get("metrics") or {}),
    }


def _number(value: Any) -> float | None:
    try:
        return None if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


# -- requests ------------------------------------------------------------------------------------


def _request_data(request: RolloutRequest, table: MessageTable) -> dict[str, Any]:
    data = {name: getattr(request, name) for name in RolloutRequest.__dataclass_fields__}
    sampling = asdict(replace(request.sampling, extra={}))
    data["sampling"] = {**sampling, "extra": redact(dict(request.sampling.extra))}
    data["input"] = _input_data(request.input, table)
    return data


def _decode_request(data: dict[str, Any], messages: MessageReader) -> RolloutRequest:
    sampling = SamplingParams(**data["sampling"])
    return RolloutRequest(
        **{**data, "sampling": sampling, "input": _decode_input(data["input"], messages)}
    )


def _input_data(value: Mapping[str, Any], table: MessageTable) -> dict[str, Any]:
    fields = {key: item for key, item in value.items() if key != "prompt"}
    return {"fields": fields, "prompt": table.add(value.get("prompt")), "has": "prompt" in value}


def _decode_input(data: dict[str, Any], messages: MessageReader) -> Any:
    prompt = {"prompt": messages.get(data["prompt"])} if data["has"] else {}
    return {**prompt, **data["fields"]}


# -- states --------------------------------------------------------------------------------------


def _as_trajectory(value: Any) -> Trajectory:
    """Return a trajectory whose tokens all lie in its own tree; `value` is not changed.

    Tokens that contradict themselves stay in their step as they are. So does a tree that has calls
    of other steps (the value is a slice, or a session's answer was not recorded).
    """
    steps: Sequence[TrajectoryStep] = value or ()
    if isinstance(value, Trajectory) and all(
        peek(step, "tokens") is None or value.call_of(index) is not None
        for index, step in enumerate(steps)
    ):
        return value
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
    """Copy one call, with all that rides along, from the view's tree into another."""
    grafted = StepTokens(tree, tree.copy_call(tokens.tree, tokens.call))
    for key in tokens.assigned:
        grafted[key] = tokens[key]
    return grafted


def _state_data(
    state: State, trajectory: Trajectory, request_input: dict[str, Any], table: MessageTable
) -> dict[str, Any]:
    own = {key: value for key, value in dict.items(state) if key not in _NOT_STORED}
    prompts: dict[int, Reference] = {}  # by the identity of the step
    error = own.get("error")
    data: dict[str, Any] = {
        "has": [key for key in _STATE_APART if key in own],
        "fields": {key: value for key, value in own.items() if key not in _STATE_APART},
        "completion": table.add(own.get("completion")),
        "error": (
            {"record": redact(error.as_dict())}
            if isinstance(error, ErrorRecord)
            else {"value": redact(error)}
        ),
        "steps": [
            _step_data(trajectory, index, table, prompts) for index in range(len(trajectory))
        ],
    }
    source = own.get("input")
    if isinstance(source, Mapping):
        found = _input_data(source, table)
        data["input"] = None if dumps(found) == dumps(request_input) else found
    return data


def _decode_state(
    data: dict[str, Any], request: RolloutRequest, tokens: bytes, messages: MessageReader
) -> State:
    own: dict[str, Any] = dict(data["fields"])
    tree = TokenTree.from_bytes(tokens)
    steps = [_decode_step(step, tree, messages) for step in data["steps"]]
    trajectory = Trajectory(steps, tree=tree)
    for step, stored in zip(trajectory, data["steps"], strict=True):
        if "loose_tokens" in stored:
            step["tokens"] = stored["loose_tokens"]
    apart = {
        "trajectory": trajectory,
        "completion": messages.get(data["completion"]),
        "error": (
            _decode_error(data["error"]["record"])
            if "record" in data["error"]
            else data["error"]["value"]
        ),
    }
    if "input" in data["has"]:
        source = data["input"]
        apart["input"] = dict(request.input) if source is None else _decode_input(source, messages)
    own.update({key: apart[key] for key in data["has"]})
    return State(own)


def _prompt_reference(step: Any, table: MessageTable, prompts: Mapping[int, Reference]) -> Any:
    """Return a prompt's reference: O(new messages) where it continues a step seen before."""
    head = step.head if isinstance(step, RecordedStep) else None
    before = prompts.get(id(head))
    if head is not None and isinstance(before, int):
        added = step.words_after(head)
        if isinstance(added, list):
            return table.add(added, table.add(peek(head, "completion"), before))
    return table.add(peek(step, "prompt"))


def _step_data(
    trajectory: Trajectory, index: int, table: MessageTable, prompts: dict[int, Reference]
) -> dict[str, Any]:
    step: Mapping[str, Any] = trajectory[index]
    completion, extras = peek(step, "completion"), peek(step, "extras")
    data: dict[str, Any] = {
        "prompt": _prompt_reference(step, table, prompts),
        "completion": table.add(completion),
        "call": trajectory.call_of(index),
        "reward": step.get("reward"),
        "advantage": step.get("advantage"),
        "extras": extras,
    }
    prompts[id(step)] = data["prompt"]
    if isinstance(completion, str) and isinstance(data["prompt"], dict):
        table.add(peek(step, "prompt") + completion)  # the next prompt most likely begins so
    response = step.response_record if isinstance(step, RecordedStep) else step.get("response")
    if isinstance(response, ModelResponse):
        data["answer"] = _answer_data(response, completion, extras or {})
    elif response is not None:
        data["response"] = _response_data(response)
    tokens = peek(step, "tokens")
    if isinstance(tokens, StepTokens):
        data["assigned"] = {key: tokens[key] for key in tokens.assigned}
    elif tokens is not None:
        data["loose_tokens"] = tokens
    more = {key: step[key] for key in step if key not in _STEP_FIELDS}
    if more:
        data["more"] = more
    return data


def _decode_step(data: dict[str, Any], tree: TokenTree, messages: MessageReader) -> TrajectoryStep:
    prompt, completion = messages.get(data["prompt"]), messages.get(data["completion"])
    response: Any = data.get("response")
    if "answer" in data:
        response = _decode_answer(data["answer"], completion, data["extras"] or {})
    step: dict[str, Any]
    if data["call"] is not None and "answer" in data and _alike(prompt, completion):
        step = RecordedStep(tree, data["call"], response, None, prompt, completion)
    else:
        step = {"prompt": prompt, "completion": completion, "response": response, "tokens": None}
        if data["call"] is not None:
            step["tokens"] = StepTokens(tree, data["call"])
    for key, value in (data.get("assigned") or {}).items():
        step["tokens"][key] = value
    step |= {key: data[key] for key in ("reward", "advantage", "extras")}
    step |= data.get("more", {})
    return cast(TrajectoryStep, step)


def _alike(prompt: Any, completion: Any) -> bool:
    return type(prompt) is type(completion) and isinstance(prompt, str | list)


def _said(completion: Any) -> tuple[Any, Any]:
    """Return the message and the text that a completion says, where it is one answer."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}, completion
    message = completion[0] if isinstance(completion, list) and len(completion) == 1 else None
    return message, message.get("content") if isinstance(message, Mapping) else None


def _answer_data(
    response: ModelResponse, completion: Any, extras: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what of a response neither the completion, the extras nor the token tree say."""
    message, text = _said(completion)
    told = {"message": message, "text": text, **{name: extras.get(name) for name in _IN_EXTRAS}}
    values = {name: getattr(response, name) for name in told}
    values["finish_reason"] = response.finish_reason.value
    data = {name: value for name, value in values.items() if value != told[name]}
    rest = {name: getattr(response, name) for name in ("id", "model", "wait_s", "info")}
    return data | {name: value for name, value in rest.items() if value}


def _decode_answer(
    data: Mapping[str, Any], completion: Any, extras: Mapping[str, Any]
) -> ModelResponse:
    message, text = _said(completion)
    told = {"message": message, "text": text, **{name: extras.get(name) for name in _IN_EXTRAS}}
    values = {**told, **data}
    return ModelResponse(**{**values, "finish_reason": FinishReason(values["finish_reason"])})


def _response_data(response: Any) -> dict[str, Any]:
    if isinstance(response, Mapping):
        return {name: response[name] for name in _RESPONSE_FIELDS if name in response}
    found = {name: getattr(response, name, None) for name in _RESPONSE_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def _decode_error(data: dict[str, Any] | None) -> ErrorRecord | None:
    return None if data is None else ErrorRecord(**data)
