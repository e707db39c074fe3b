"""One rollout to read: what was said, what it earned, where its time went, how it failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rolltree.insight.page.pages import COLUMNS, Offset
from rolltree.insight.page.token_lens import one_rollout, rollout_breaks
from rolltree.records.conversations import tool_call_parts
from rolltree.records.rewards import reward_parts
from rolltree.records.token_rows import call_rows, state_of
from rolltree.records.tokenizer import shown_tokenizer
from rolltree.records.values import values_of_rows
from rolltree.rollouts.conversation import conversation_of, message_list
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.programs import program_ending, program_of
from rolltree.store import Run, StoredRollout, to_plain
from rolltree.tokens import peek
from rolltree.values.state import tool_errors
from rolltree.values.types import State


def rollout_view(run: Run, id: str, index: Offset = 0) -> dict[str, Any]:
    """Return everything about one rollout except its tokens, JSON-ready.

    Raises:
        UnknownName: the run has no such rollout.
    """
    row = one_rollout(run, id, index)
    state = state_of(row)
    others = _others(run, row)
    calls = [] if state is None else _timed(list(call_rows(state)))
    messages = [] if state is None else _messages(state)
    return {
        # Its columns of table `rollouts`, and its dataset row without the prompt.
        "rollout": {
            name: values[0] for name, values in values_of_rows(run, COLUMNS, [row]).items()
        },
        "input": to_plain(dict(row.input)),
        "messages": messages,
        # The calls that are not trained and whose answers are not among the messages.
        "left_out": [] if state is None else _left_out(state, calls, messages),
        # How its program ended, if it ran one.
        "program": None if state is None else _program(state),
        # Rows of table `calls`, with `own_ms`: how long environment and tools took after the call
        # before (None if times were not recorded).
        "calls": calls,
        # The parts of the reward, and the other metrics.
        "rewards": reward_parts(run, row),
        "timing": _timing(row, calls),
        "errors": [to_plain(dict(error)) for error in row.errors],
        # The errors of tools, which the model was shown.
        "tool_errors": [] if state is None else tool_errors(state),
        "breaks": [] if state is None else rollout_breaks(state, shown_tokenizer(run)),
        # The other rollouts of its request.
        "others": others,
        # The rollout that delegated it, and those that it delegated, with their subtasks.
        **_relatives(run, row, others),
    }


_MOST_RELATIVES = 100
_MOST_LEFT_OUT = 100
_MOST_TEXT = 16_384
_PROGRAM = (
    *("ended", "exit_status", "signal", "wall_s", "cpu_s", "peak_memory_bytes"),
    *("stdout", "stderr", "num_files_left_out", "error"),
)


def _others(run: Run, row: StoredRollout) -> list[dict[str, Any]]:
    names = ("trajectory_index", "agent", "reward")
    rows = run.columns(names, request_id=row.request_id)
    return [each._asdict() for each in rows if each.trajectory_index != row.trajectory_index]


def _relatives(run: Run, row: StoredRollout, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `asked` (None if it was not delegated), `parent` and `children`."""
    if not others or row.num_trajectories > _MOST_RELATIVES:
        return {"asked": None, "parent": None, "children": []}
    relatives: dict[str, dict[str, Any]] = {}
    for each in run.rollouts(request_id=row.request_id):
        for state in decode_rollout(each, tokens=False).states:
            relatives[str(state.get("rollout_id"))] = {
                "request_id": each.request_id,
                "trajectory_index": each.trajectory_index,
                "agent": each.agent,
                "reward": each.reward,
                "asked": None if state.get("subtask") is None else str(state.get("subtask")),
                "parent": each.parent_rollout,
            }
    at = row.trajectory_index
    own = {name: each for name, each in relatives.items() if each["trajectory_index"] == at}
    return {
        "asked": next((each["asked"] for each in own.values()), None),
        "parent": relatives.get(row.parent_rollout or ""),
        "children": [each for each in relatives.values() if each["parent"] in own],
    }


def _messages(state: State) -> list[dict[str, Any]]:
    """Return prompt and completion; a message that ends a call's completion names that call."""
    prompt, completion = conversation_of(state)
    said = [_last(step.get("completion")) for step in state["trajectory"]]
    shown = [_message(message, True, None) for message in prompt]
    at = 0
    for message in completion:
        call = None
        if message.get("role") == "assistant":
            call = next((i for i in range(at, len(said)) if said[i] == message), None)
            at = at if call is None else call + 1
        shown.append(_message(message, False, call))
    return shown


def _left_out(
    state: State, calls: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    shown = {message["call"] for message in messages}
    rows = []
    for each in calls:
        if each["left_out"] is None or each["call"] in shown:
            continue
        step = state["trajectory"][each["call"]]
        asked = message_list(peek(step, "prompt"), "user")[-1:]
        answer = message_list(peek(step, "completion"), "assistant")
        rows.append(
            {
                "call": each["call"],
                "why": each["left_out"],
                "messages": [
                    *(_message(message, True, None) for message in asked),
                    *(_message(message, False, each["call"]) for message in answer),
                ],
            }
        )
    return rows[:_MOST_LEFT_OUT]


def _program(state: State) -> dict[str, Any] | None:
    program = program_of(state)
    if program is None:
        return None
    returned = program.get("returned")
    return {
        "how": program_ending(program),
        **{name: to_plain(program.get(name)) for name in _PROGRAM},
        "files": [str(name) for name in program.get("files") or ()],
        "returned": None if returned is None else json.dumps(to_plain(returned))[:_MOST_TEXT],
    }


def _last(completion: Any) -> Any:
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    return completion[-1] if completion else None


def _message(message: Mapping[str, Any], is_prompt: bool, call: int | None) -> dict[str, Any]:
    content = message.get("content")
    return {
        "role": str(message.get("role") or ""),
        # A text, or parts.
        "content": content if isinstance(content, str) else to_plain(content),
        "reasoning": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": [tool_call_parts(each) for each in message.get("tool_calls") or ()],
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "is_prompt": is_prompt,
        # The model call that wrote it.
        "call": call,
    }


def _timed(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `own_ms`; runs of older versions have no times of calls, so theirs are None, not 0."""
    # 0 ms for every call means that times were not measured, so they are shown as unknown.
    is_timed = any(call["time_ms"] for call in calls)
    ended = 0.0
    for call in calls:
        if not is_timed or call["sent_ms"] is None or call["time_ms"] is None:
            call |= {"own_ms": None, "sent_ms": None, "time_ms": None}
            continue
        call["own_ms"] = max(0.0, call["sent_ms"] - ended)
        ended = call["sent_ms"] + call["time_ms"]
    return calls


def _timing(row: StoredRollout, calls: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    times = [call["time_ms"] for call in calls if call["time_ms"] is not None]
    # The times of concurrent calls may add up to more than the elapsed time.
    server = min(sum(times), row.generation_ms) if times else None
    return {
        "generation_ms": row.generation_ms,
        # Waiting for answers; the rest is the environment's and its tools'.
        "server_ms": server,
        "own_ms": None if server is None else row.generation_ms - server,
        "scoring_ms": row.scoring_ms,
        "total_ms": row.total_ms,
    }
