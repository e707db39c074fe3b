"""How a request has its chat rendered, where it asks for more than the template's own way.

`chat_template_kwargs` are further names for the template. With `continue_final_message` the prompt
ends inside the last message, an assistant's, which the answer continues.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rolltree.inference.formats.reader import ParsedCompletion
from rolltree.inference.request_fields import RENDERING, Rendering, asks_for_form
from rolltree.inference.template import TemplateError
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    IntArray,
    SamplingParams,
    ToolSchema,
)

if TYPE_CHECKING:
    from rolltree.inference.chat import ChatRenderer

_END_OF_BEGUN = f"Qz{secrets.token_hex(6)}Pq"
"""Stands after the text that an answer continues; random, so that no message contains it."""
_REMEMBERED = 16
"""How many sets of further names for the template are kept."""
_OWN_NAMES = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
}


def split(sampling: SamplingParams) -> tuple[Rendering, SamplingParams]:
    """Return how the prompt is to be rendered, and the settings without these fields.

    Raises:
        UnsupportedSetting: a value cannot be followed.
    """
    extra = sampling.extra
    body = extra.get("extra_body") or {}
    asked = {name: body.get(name, extra.get(name)) for name in RENDERING}
    variables = asked["chat_template_kwargs"] or {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise UnsupportedSetting("chat_template_kwargs is not an object of names and values.")
    if own := variables.keys() & _OWN_NAMES:
        raise UnsupportedSetting(
            f"chat_template_kwargs has {', '.join(sorted(own))}, which the request itself decides. "
            "Leave it out."
        )
    opens, continues = (asked[name] for name in RENDERING[1:])
    for name in RENDERING[1:]:
        if asked[name] not in (None, True, False):
            raise UnsupportedSetting(f"{name} = {asked[name]!r} is neither true nor false.")
    if (opens is True and continues) or (opens is False and not continues):
        raise UnsupportedSetting(
            f"add_generation_prompt = {opens} with continue_final_message = {bool(continues)}: an "
            "answer begins either after the opening of its turn, or after the final message. Send "
            "add_generation_prompt: false with continue_final_message: true, or neither."
        )
    left = {name: value for name, value in extra.items() if name not in RENDERING}
    if body:
        left["extra_body"] = {n: value for n, value in body.items() if n not in RENDERING}
    return Rendering(variables, bool(continues)), replace(sampling, extra=left)


def other_renderer(
    renderer: ChatRenderer,
    arguments: Mapping[str, Any],
    known: dict[str, ChatRenderer],
    variables: Mapping[str, Any],
) -> ChatRenderer:
    """Return a renderer with the same arguments and further names; `known` keeps some of them."""
    key = json.dumps(variables, sort_keys=True, default=repr)
    if key not in known:
        if len(known) >= _REMEMBERED:
            known.pop(next(iter(known)), None)
        names = {**(arguments["variables"] or {}), **variables}
        made = type(renderer)(renderer.tokenizer, **{**arguments, "variables": names})
        made.asked_names = tuple(variables)
        known[key] = made
    return known[key]


def begun(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with a mark at the end of the final one.

    Raises:
        UnsupportedSetting: the final message is not an assistant's text.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(content, str):
        raise UnsupportedSetting(
            "continue_final_message is set, and the final message is not an assistant's text, "
            "which an answer could continue. End with one, or leave the field out."
        )
    return [*messages[:-1], {**last, "content": content + _END_OF_BEGUN}]


def until_mark(text: str) -> str:
    """Return a rendered prompt up to the mark of `begun`.

    Raises:
        TemplateError: the template does not show it.
    """
    shown, mark, _ = text.rpartition(_END_OF_BEGUN)
    if not mark:
        raise TemplateError(
            "the chat template does not show the final message of an assistant, so an answer "
            "cannot continue it. End with a user's message."
        )
    return shown


def parse_begun(
    renderer: ChatRenderer,
    beginning: str,
    text: str,
    finish_reason: FinishReason,
    tools: Sequence[ToolSchema] | None,
    ids: Sequence[int] | IntArray | None,
) -> ParsedCompletion:
    """Read what was sampled after `beginning`, the beginning of an answer in its prompt."""
    whole, parser = beginning + text, renderer.parser.after_reasoning()
    if ids is not None:
        ids = [*renderer.vocabulary.encode(beginning).tolist(), *ids]
    places = None if ids is None else parser.places(whole, ids, renderer.decode)
    parsed = parser.parse(whole, finish_reason, tools, places)
    content = str(parsed.message["content"])
    # With calls, the space around the content is gone.
    rest = "" if beginning.startswith(content) else content.removeprefix(beginning)
    return replace(parsed, message={**parsed.message, "content": rest}, text=text)


def check_rendering(rendering: Rendering, sampling: SamplingParams, message_type: str) -> None:
    """Raise `UnsupportedSetting` for a rendering that does not go with the rest of a call."""
    if message_type != "chat":
        raise UnsupportedSetting(
            "chat_template_kwargs and continue_final_message are for chats, and a text is "
            "continued as it is. Leave them out."
        )
    if rendering.continues and asks_for_form(sampling.extra):
        raise UnsupportedSetting(
            "an answer that continues the final message cannot be held to a form as well "
            "(response_format, structured_outputs, tool_choice). Leave one of them out."
        )


def ends_with(renderer: ChatRenderer, ids: IntArray, message: ChatMessage) -> bool:
    """Whether a call's ids end with its answer's text: it was cut, and can go on from there."""
    said = message.get("content")
    if not said or int(ids[-1]) in renderer.end_ids:
        return False
    return renderer.decode(ids).endswith(str(said))
