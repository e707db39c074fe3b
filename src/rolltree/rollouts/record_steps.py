"""Converts the steps of a trajectory to record data and back, with their token tree.

The raw response of a wrapped client is not kept, only its identity and usage: its text is in the
completion, and its ids and logprobs are in the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rolltree.rollouts.message_table import MessageReader, MessageTable, Reference
from rolltree.store.codec import is_equal
from rolltree.tokens import KeptResponse, RecordedStep, StepTokens, TokenTree, Trajectory, peek
from rolltree.values.types import FinishReason, ModelResponse, TrajectoryStep

_RESPONSE_FIELDS = ("id", "model", "object", "created", "system_fingerprint", "usage")
_IN_EXTRAS = (
    *("finish_reason", "temperature", "call_id"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
_PROCESS_ONLY = ("extends",)  # a hint for the tree, which has used it by now
_STORED_ELSEWHERE = ("message", "text", *_IN_EXTRAS)  # in the completion and the extras
_REST = tuple(
    name for name in KeptResponse._fields if name not in (*_STORED_ELSEWHERE, *_PROCESS_ONLY)
)
_STEP_FIELDS = ("prompt", "completion", "response", "tokens", "reward", "advantage", "extras")


def trajectory_data(trajectory: Trajectory, table: MessageTable) -> list[dict[str, Any]]:
    """Return the record data of each step; the messages go to `table`."""
    # Keyed by `id(step)`.
    prompts: dict[int, Reference] = {}
    return [step_data(trajectory, index, table, prompts) for index in range(len(trajectory))]


def decode_trajectory(
    data: Sequence[Mapping[str, Any]], tokens: bytes, messages: MessageReader
) -> Trajectory:
    """Rebuild a trajectory from the result of `trajectory_data` and the bytes of its tree."""
    tree = TokenTree.from_bytes(tokens)
    trajectory = Trajectory([decode_step(step, tree, messages) for step in data], tree=tree)
    # The tree refused inconsistent tokens when they were recorded. They are put back unchanged,
    # outside the tree, so that an audit can find them.
    for step, stored in zip(trajectory, data, strict=True):
        if "loose_tokens" in stored:
            step["tokens"] = stored["loose_tokens"]
    return trajectory


def _prompt_reference(step: Any, table: MessageTable, prompts: Mapping[int, Reference]) -> Any:
    """Return a prompt's reference, in O(new messages) if it continues an earlier step."""
    # A recorded step knows which step its prompt continues. For other steps, each prompt is
    # compared from its beginning, which is O(T^2) in turns.
    head = step.head if isinstance(step, RecordedStep) else None
    before = prompts.get(id(head))
    if head is not None and isinstance(before, int):
        added = step.new_messages(head)
        if isinstance(added, list):
            return table.add(added, table.add(peek(head, "completion"), before))
    return table.add(peek(step, "prompt"))


def step_data(
    trajectory: Trajectory, index: int, table: MessageTable, prompts: dict[int, Reference]
) -> dict[str, Any]:
    """Return the record data of one step; `prompts` maps ids of earlier steps to references."""
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
        # The next prompt most likely begins with this text.
        table.add(peek(step, "prompt") + completion)
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


def decode_step(
    data: Mapping[str, Any], tree: TokenTree, messages: MessageReader
) -> TrajectoryStep:
    """Rebuild the step that `step_data` encoded."""
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


def _message_and_text(completion: Any) -> tuple[Any, Any]:
    """Return the message and the text of a completion, if it is a single answer."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}, completion
    message = completion[0] if isinstance(completion, list) and len(completion) == 1 else None
    return message, message.get("content") if isinstance(message, Mapping) else None


def _answer_data(
    response: ModelResponse, completion: Any, extras: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a response that the completion, extras and token tree do not imply."""
    message, text = _message_and_text(completion)
    implied = {"message": message, "text": text, **{name: extras.get(name) for name in _IN_EXTRAS}}
    values = {name: getattr(response, name) for name in implied}
    values["finish_reason"] = response.finish_reason.value
    data = {name: value for name, value in values.items() if not is_equal(value, implied[name])}
    rest = {name: getattr(response, name) for name in _REST}
    return data | {name: value for name, value in rest.items() if value}


def _decode_answer(
    data: Mapping[str, Any], completion: Any, extras: Mapping[str, Any]
) -> ModelResponse:
    message, text = _message_and_text(completion)
    implied = {"message": message, "text": text, **{name: extras.get(name) for name in _IN_EXTRAS}}
    values = {**implied, **data}
    return ModelResponse(**{**values, "finish_reason": FinishReason(values["finish_reason"])})


def _response_data(response: Any) -> dict[str, Any]:
    if isinstance(response, Mapping):
        # A raw response of an SDK repeats every id and logprob, which the tree has.
        return {name: response[name] for name in _RESPONSE_FIELDS if name in response}
    found = {name: getattr(response, name, None) for name in _RESPONSE_FIELDS}
    return {name: value for name, value in found.items() if value is not None}
