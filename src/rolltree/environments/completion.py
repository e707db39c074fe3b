"""The completion of a rollout: everything after its prompt, even if histories were rewritten."""

from __future__ import annotations

from collections.abc import Sequence

from rolltree.tokens import RecordedStep, Trajectory, peek
from rolltree.values.types import ChatMessage, Messages, TrajectoryStep, concat_messages


def render_completion(
    prompt: Messages, steps: Sequence[TrajectoryStep], final_response: Messages | None = None
) -> Messages:
    """Return all messages after `prompt`, in order.

    If each step's prompt continues the previous step, they are the last step's conversation without
    `prompt`. If an environment rewrote the history, earlier messages are kept, and such a prompt
    adds what follows both its last assistant message and the messages that it shares with the
    previous conversation. `final_response` is the environment's response after the last step.
    Without steps the completion is empty.
    """
    empty: Messages = "" if isinstance(prompt, str) else []
    parts: list[Messages] = [empty]
    last: TrajectoryStep | None = None
    for step in steps:
        words = step.new_messages(last) if isinstance(step, RecordedStep) else None
        if words is None:
            before = prompt if last is None else conversation([last])
            words = appended_messages(before, peek(step, "prompt"))
        parts.append(words)
        parts.append(peek(step, "completion"))
        last = step
    if final_response:
        parts.append(final_response)
    return concat_messages(parts)


def conversation(steps: Sequence[TrajectoryStep]) -> Messages:
    """Return the conversation up to the end of the last step, including its prompt.

    A list is new, but its messages are the steps' own objects.
    """
    if isinstance(steps, Trajectory):
        return steps.conversation()
    return concat_messages([peek(steps[-1], "prompt"), peek(steps[-1], "completion")])


def appended_messages(before: Messages, prompt: Messages) -> Messages:
    """Return the part of `prompt` that is new after the conversation `before`."""
    shared = _num_shared(before, prompt)
    if isinstance(prompt, str) or isinstance(before, str) or shared == len(before):
        return prompt[shared:]
    return prompt[max(shared, _after_last_answer(prompt)) :]


def _num_shared(first: Messages, second: Messages) -> int:
    shared = 0
    for left, right in zip(first, second, strict=False):
        if left is not right and left != right:
            break
        shared += 1
    return shared


def _after_last_answer(messages: list[ChatMessage]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "assistant":
            return index + 1
    return 0
