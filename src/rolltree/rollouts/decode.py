"""Decodes stored rows into rollout results, with or without tokens.

A caller that needs no tokens imports neither the token tree nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rolltree.rollouts.message_table import MessageReader
from rolltree.store import StoredRollout, loads
from rolltree.store.rows import LIGHT
from rolltree.values.errors import StoreError
from rolltree.values.state import UnscoredSnapshot
from rolltree.values.types import (
    ErrorRecord,
    ModelResponse,
    RolloutRequest,
    RolloutResult,
    SamplingParams,
    State,
)

VERSION = 1
"""The version of the record that `rolltree.rollouts.record` writes."""
UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(MemoryError, RecursionError),
)
"""The exceptions that reading a record that rolltree did not write can raise."""


def decode_rollout(row: StoredRollout, *, tokens: bool = True) -> RolloutResult:
    """Rebuild the result that one row holds: its request, its one state, its error.

    Without `tokens`, a step of the trajectory is a plain dict with its prompt, completion, reward,
    advantage and extras.

    Raises:
        StoreError: the row was read without its blobs, or its record is not one of this version.
    """
    if not row.record:
        raise StoreError(
            f"rollout {row.request_id!r} was read without its record, so it has no messages. Read "
            "it with run.rollouts(blobs=True)."
        )
    try:
        return _decode(row, tokens)
    except UNREADABLE as error:
        raise StoreError(
            f"rollout {row.request_id!r} has a record that rolltree did not write "
            f"({type(error).__name__}: {error}), so its messages and tokens cannot be read. "
            "`rolltree data RUN rollouts` shows its columns."
        ) from error


def _decode(row: StoredRollout, tokens: bool) -> RolloutResult:
    record = loads(row.record)
    # Checked first: a later version may give the same names a different meaning.
    if record["version"] != VERSION:
        raise StoreError(
            f"rollout {row.request_id!r} has record version {record['version']}; this rolltree "
            f"reads version {VERSION}. Upgrade rolltree to read it."
        )
    messages = MessageReader(record["table"])
    request = decode_request(record["request"], messages)
    states: tuple[State, ...] = ()
    if record["state"] is not None:
        tree = row.tokens if tokens else None
        states = (_decode_state(record["state"], request, tree, messages),)
    return RolloutResult(request, states, _decode_error(record["error"]), row.num_attempts)


def decode_results(
    rows: Iterable[StoredRollout], *, tokens: bool = True
) -> Iterator[RolloutResult]:
    """Rebuild whole results: adjacent rows of one request become one result.

    `run.rollouts()` yields the rows of a request next to each other. `tokens` is passed to
    `decode_rollout`.
    """
    pending: RolloutResult | None = None
    # Rows of one request are adjacent, so only one pending result is kept in memory.
    for row in rows:
        result = decode_rollout(row, tokens=tokens)
        if pending is not None and pending.request.request_id == row.request_id:
            pending = replace(pending, states=(*pending.states, *result.states))
            continue
        if pending is not None:
            yield pending
        pending = result
    if pending is not None:
        yield pending


def export_line(row: StoredRollout, *, tokens: bool = True) -> dict[str, Any]:
    """Return a row as a dict in the format of verifiers, for `run.export(render=...)`.

    `trajectory` repeats every step's prompt and token lists, so its size is O(T^2) in turns.
    Without `tokens` it is left out. A step's `response` has OpenAI's fields (`choices`, `usage`)
    and the times of the call; its ids and logprobs are in the step's `tokens`.
    """
    line = {name: getattr(row, name) for name in LIGHT}
    result = decode_rollout(row, tokens=tokens)
    line["prompt"] = result.request.input["prompt"]
    for state in result.states:
        line["prompt"] = state.get("prompt")
        line["completion"] = state.completion
        if not tokens:
            continue
        line["trajectory"] = [
            {
                **step,
                "response": _exported_response(step["response"]),
                "tokens": _plain_tokens(step["tokens"]),
            }
            for step in state.trajectory
        ]
    return line


def _plain_tokens(tokens: Any) -> Any:
    # An environment may have assigned anything.
    return dict(tokens.items()) if isinstance(tokens, Mapping) else tokens or None


def _exported_response(response: Any) -> Any:
    if not isinstance(response, ModelResponse):
        # A response of a wrapped client, of which a dict was kept.
        return response
    (choice,) = response.choices
    answer = {
        "index": choice.index,
        "message": choice.message.model_dump(),
        "text": choice.text,
        "finish_reason": choice.finish_reason,
    }
    times = {name: getattr(response, name) for name in ("wait_s", "sent_s", "time_s")}
    return {
        "id": response.id,
        "model": response.model,
        "choices": [answer],
        "usage": response.usage.model_dump(),
        **times,
        "info": response.info,
    }


def decode_request(data: dict[str, Any], messages: MessageReader) -> RolloutRequest:
    """Return the request that `record.request_data` described."""
    sampling = SamplingParams(**data["sampling"])
    return RolloutRequest(
        **{**data, "sampling": sampling, "input": _decode_input(data["input"], messages)}
    )


def _decode_input(data: dict[str, Any], messages: MessageReader) -> Any:
    prompt = {"prompt": messages.get(data["prompt"])} if data["has"] else {}
    return {**prompt, **data["fields"]}


def _decode_state(
    data: dict[str, Any], request: RolloutRequest, tree: bytes | None, messages: MessageReader
) -> State:
    own: dict[str, Any] = dict(data["fields"])
    trajectory: Any
    if tree is None:
        trajectory = [
            {name: messages.get(step[name]) for name in ("prompt", "completion")}
            | {name: step[name] for name in ("reward", "advantage", "extras")}
            for step in data["steps"]
        ]
    else:
        # Imported here, so that listing messages needs neither numpy nor the token tree.
        from rolltree.rollouts.record_steps import decode_trajectory

        trajectory = decode_trajectory(data["steps"], tree, messages)
    # Only keys that the state had are put back: a missing key is different from None.
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
    state = State(own)
    if "played" in data:
        # The key in the file is older than the class and keeps its name.
        state.unscored = _decode_unscored(data["played"], state)
    return state


def _decode_unscored(data: dict[str, Any], state: State) -> UnscoredSnapshot:
    return UnscoredSnapshot(
        keys=frozenset(dict.keys(state) - set(data.get("added", ()))),
        reward=data.get("reward"),
        metrics=data.get("metrics"),
        step_rewards=data.get("step_rewards", (None,) * len(state.trajectory)),
        has_step_rewards=data.get("has_step_rewards"),
    )


def _decode_error(data: dict[str, Any] | None) -> ErrorRecord | None:
    return None if data is None else ErrorRecord(**data)
