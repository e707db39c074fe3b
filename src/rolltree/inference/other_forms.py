"""Other forms of a conversation, for a chat template or server that does not take it as it is.

Templates refuse what a model may well write (several calls in one message, arguments that are not
an object, an empty answer) and what a world may well show it (two messages in a row). Others leave
out what they do not know (a developer, calls, results), without a word. The
conversation goes on in the mildest form that they take, because a rollout without a reward would
leave the baseline by what the model wrote. What the model sampled does not change: only prompts
that are rendered from messages do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import takewhile
from typing import Any, TypeAlias

from rolltree._helpers.untrusted import read_json
from rolltree.values.types import ChatMessage

_Change: TypeAlias = Callable[[list[ChatMessage]], list[ChatMessage]]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_REASONING = ("reasoning_content", "reasoning", "thinking")


REMINDER_NOTE = {
    "messages.system": "the chat template takes no system message later than the first: such a "
    "message was shown as a turn of the user, in <system-reminder>"
}


def other_forms(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield a refused conversation in other forms, the mildest first.

    Each change is tried alone, then all of them, and last with calls and results as plain text.
    """
    original = list(messages)
    tried = [original]
    for change in (*_CHANGES, _changed, _changed_and_spoken):
        form = change(original)
        if form not in tried:
            tried.append(form)
            yield form


def _changed(messages: list[ChatMessage]) -> list[ChatMessage]:
    return reduce(lambda history, change: change(history), _CHANGES, messages)


def _changed_and_spoken(messages: list[ChatMessage]) -> list[ChatMessage]:
    return _in_turns(_spoken(_changed(messages)))


def _one_call_each(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Split messages with several calls; each call is followed by its result."""
    made: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], _calls(messages[at])
        at += 1
        if len(calls) < 2:
            made.append(message)
            continue
        results = list(takewhile(_is_result, messages[at:]))
        at += len(results)
        for index, call in enumerate(calls):
            head = {"role": "assistant", "content": ""} if index else message
            made.append({**head, "tool_calls": [call]})
            mine = [r for r in results if r.get("tool_call_id") == _read(call, "id")][:1]
            made += mine
            results = [r for r in results if not any(r is each for each in mine)]
        made += results
    return made


def _with_objects(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Make the arguments of every call an object: `""` is an empty one."""

    def change(call: Any) -> Any:
        function = _read(call, "function")
        if not isinstance(function, Mapping):
            return call
        return {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}

    return [_with_calls(message, change) for message in messages]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments)
    except ValueError:
        return arguments.strip() or None


def _object(arguments: Any) -> Any:
    value = _value(arguments)
    if isinstance(value, dict):
        return arguments
    # Named, so that the model still sees what it wrote.
    return json.dumps({} if value is None else {"arguments": value}, ensure_ascii=False)


def _with_short_ids(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Give calls and results the ids that Mistral's templates take: nine letters and digits."""

    def short(name: Any) -> str:
        text = str(name)
        return text if _SHORT_ID.fullmatch(text) else _hash(text)

    def change(call: Any) -> Any:
        return {**call, "id": short(call.get("id"))} if isinstance(call, Mapping) else call

    return [
        {**message, "tool_call_id": short(message.get("tool_call_id"))}
        if _is_result(message)
        else _with_calls(message, change)
        for message in messages
    ]


def _hash(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass")).hexdigest()[:9]


def _never_empty(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Write a space as the text of an answer that has neither text nor calls."""
    return [
        {**message, "content": " "}
        if message.get("role") == "assistant" and not message.get("content") and not _calls(message)
        else message
        for message in messages
    ]


def _without_marks(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Break the control tokens that an answer spells out: gpt-oss's template refuses some."""
    return [
        {
            name: value.replace("<|", "< |") if isinstance(value, str) else value
            for name, value in message.items()
        }
        if message.get("role") == "assistant"
        else message
        for message in messages
    ]


def _without_reasoning(messages: list[ChatMessage]) -> list[ChatMessage]:
    return [
        {name: value for name, value in message.items() if name not in _REASONING}
        for message in messages
    ]


def _in_turns(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Join a message with the one before if templates want their roles to alternate.

    The text of a user after a tool's result, such as a call that could not be read, joins it.
    """
    made: list[ChatMessage] = []
    for message in messages:
        roles = (made[-1].get("role") if made else None, message.get("role"))
        texts = (made[-1].get("content") if made else None, message.get("content"))
        joins = roles in (("user", "user"), ("tool", "user")) or (
            roles == ("assistant", "assistant") and not _calls(made[-1]) and not _calls(message)
        )
        if joins and all(isinstance(text, str) for text in texts):
            made[-1] = {**made[-1], "content": "\n\n".join(text for text in texts if text)}
        else:
            made.append(message)
    return made


def _one_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Make a developer's message a system message, or a later one of either a user's reminder."""
    made: list[ChatMessage] = []
    for message in messages:
        if message.get("role") in ("system", "developer"):
            message = _reminder(message) if made else {**message, "role": "system"}
        made.append(message)
    return made


def _reminder(message: ChatMessage) -> ChatMessage:
    """Return a turn of the user whose text stands in a tag that models know as the system's."""
    start, end = (f"<{mark}system-reminder>" for mark in ("", "/"))
    content = message.get("content") or ""
    if isinstance(content, list | tuple):
        text = {"type": "text"}
        content = [{**text, "text": start}, *content, {**text, "text": end}]
    elif isinstance(content, str) and start not in content:  # an agent may have written it
        content = f"{start}\n{content}\n{end}"
    return {**message, "role": "user", "content": content}


def reminders(messages: Sequence[ChatMessage], form: Sequence[ChatMessage]) -> dict[str, str]:
    """Return the note on a form in which system messages became turns of the user, if any did."""
    num_system = sum(message.get("role") in ("system", "developer") for message in messages)
    num_left = sum(message.get("role") in ("system", "developer") for message in form)
    return dict(REMINDER_NOTE) if num_left < num_system else {}


def _ends_with_a_turn(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Let a user ask for more if the last message is the assistant's, whose turn it would be."""
    if not messages or messages[-1].get("role") != "assistant" or _calls(messages[-1]):
        return messages
    return [*messages, {"role": "user", "content": "Continue."}]


def _developer_as_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def _spoken(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Write calls as text of the answer, and results as messages of the user."""
    return _results_of_user(_calls_as_text(messages))


def _results_of_user(messages: list[ChatMessage]) -> list[ChatMessage]:
    return [
        {"role": "user", "content": message.get("content")} if _is_result(message) else message
        for message in messages
    ]


def _calls_as_text(messages: list[ChatMessage]) -> list[ChatMessage]:
    made: list[ChatMessage] = []
    for message in messages:
        if calls := _calls(message):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            functions = [_read(call, "function") for call in calls]
            lines = [
                json.dumps({"name": _read(f, "name"), "arguments": _value(_read(f, "arguments"))})
                for f in functions
            ]
            content = message.get("content")
            said = [content] if isinstance(content, str) and content.strip() else []
            made.append({**rest, "content": "\n".join([*said, *lines])})
        else:
            made.append(message)
    return made


_CHANGES: tuple[_Change, ...] = (
    _with_objects,
    _one_call_each,
    _with_short_ids,
    _never_empty,
    _without_marks,
    _without_reasoning,
    _one_system,
    _ends_with_a_turn,
    _in_turns,
)


MARK = "Qz7ShownZq"
"""With a number, what is looked for in a rendered `Kind.probe`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of conversation that some templates render without what makes its kind.

    `probe` is one, whose marks all have to show; `change` makes it a conversation that they show.
    `is_role`: a template that refuses the probe does not take the role in this place.
    """

    occurs: Callable[[Sequence[ChatMessage]], bool]
    change: _Change
    probe: list[ChatMessage]
    num_marks: int = 1
    is_role: bool = False


def _text(role: str, number: int | None = None) -> ChatMessage:
    return {"role": role, "content": "Probe." if number is None else f"{MARK}{number}"}


def _caller(*names: str) -> ChatMessage:
    calls = [
        {"id": f"probe000{index}", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_USER, _ANSWER = _text("user"), _text("assistant")
_RESULT = {**_text("tool", 0), "name": "probe", "tool_call_id": "probe0000"}
KINDS: dict[str, Kind] = {
    "developer": Kind(
        lambda messages: any(message.get("role") == "developer" for message in messages),
        _developer_as_system,
        [_text("developer", 0), _USER],
        is_role=True,
    ),
    "later system": Kind(
        lambda messages: any(message.get("role") == "system" for message in messages[1:]),
        _one_system,
        [_text("system", 0), _USER, _ANSWER, _text("system", 1), _USER],
        2,
        is_role=True,
    ),
    "calls": Kind(
        lambda messages: any(map(_calls, messages)),
        _calls_as_text,
        [_USER, _caller(f"{MARK}0"), {**_RESULT, "content": "Probe."}],
    ),
    "several calls": Kind(
        lambda messages: any(len(_calls(message)) > 1 for message in messages),
        _one_call_each,
        [
            *(_USER, _caller(f"{MARK}0", f"{MARK}1"), {**_RESULT, "content": "Probe."}),
            {**_RESULT, "content": "Probe.", "tool_call_id": "probe0001"},
        ],
        2,
    ),
    "results": Kind(
        lambda messages: any(map(_is_result, messages)),
        _results_of_user,
        [_USER, _caller("probe"), _RESULT],
    ),
}
"""What templates leave out without a word, in the order in which it is changed."""


def _calls(message: ChatMessage) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else []


def _with_calls(message: ChatMessage, change: Callable[[Any], Any]) -> ChatMessage:
    calls = _calls(message)
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _is_result(message: ChatMessage) -> bool:
    return message.get("role") == "tool"


def _read(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
