"""A Hugging Face chat template: messages in, text out, without transformers.

It gives a template the globals and filters that templates of model folders expect
(`raise_exception`, `strftime_now`, `tojson`, loop controls, the `generation` tag) and the shapes of
messages they expect (text content, tool arguments as mappings). It knows nothing about tokens.
It leaves out images and audio: a message with other than text parts is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from rolltree.errors import ConfigError, UnsupportedSetting
from rolltree.inference.guard import GuardedEnvironment, LimitExceeded, Limits, guarded
from rolltree.types import ChatMessage, ToolSchema


class TemplateError(ConfigError):
    """The template refused this conversation, broke, or outgrew its limits."""


class TemplateLimitError(TemplateError):
    """The template ran too long or made something too large: it is broken or hostile."""


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """One compiled chat template.

    `variables` are extra names the template may read: the special tokens (`bos_token`,
    `eos_token`) and switches such as `enable_thinking`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> None:
        self.source = source
        self.variables = dict(variables or {})
        self.limits = limits
        environment = GuardedEnvironment(limits)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        environment.add_filter("tojson", _to_json)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile (line {error.lineno}: {error.message}), so no "
                "prompt can be rendered. Check the model folder's chat_template."
            ) from error
        self._parts = self._wants_parts()

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, special tokens spelled out.

        Raises:
            TemplateError: the template refuses these messages or outgrew `limits`.
            UnsupportedSetting: a message holds something other than text.
        """
        prepared = [for_template(message, self._parts) for message in messages]
        try:
            return self._render(prepared, tools, add_generation_prompt)
        except TemplateLimitError:
            raise
        except TemplateError:
            # Some templates (DeepSeek V3) take tool arguments as text, most as a mapping.
            as_text = [_with_text_arguments(message) for message in prepared]
            if as_text == prepared:
                raise
            try:
                return self._render(as_text, tools, add_generation_prompt)
            except TemplateError:
                pass
            raise

    def _render(
        self,
        messages: list[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            with guarded(self.limits):
                return self._template.render(
                    **self.variables,
                    messages=messages,
                    tools=list(tools) if tools else None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )
        except LimitExceeded as error:
            raise TemplateLimitError(
                f"the chat template was stopped: {error}. Its prompts cannot be had; it is broken "
                "or hostile. Choose another template."
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(
                f"the chat template cannot render roles {_shorten(roles)}: {error}. The model "
                "cannot be asked this way; change the messages or choose another template."
            ) from error
        except (RecursionError, MemoryError, OverflowError, ArithmeticError) as error:
            raise TemplateError(
                f"the chat template broke with {type(error).__name__}: {error}. It is not one a "
                "model folder should have; choose another template."
            ) from error

    def _wants_parts(self) -> bool:
        """Whether content must be a list of parts, as templates of vision models have it."""
        probe = "Qz7PartsZq"
        for parts in (False, True):
            message = for_template({"role": "user", "content": probe}, parts)
            try:
                if probe in self._render([message], None, True):
                    return parts
            except TemplateLimitError:
                raise
            except TemplateError:
                continue
        return False


def for_template(message: ChatMessage, parts: bool = False) -> ChatMessage:
    """Return the message as templates expect it; the same dict where it already is.

    Content becomes one string (text parts joined with a newline), or a list of one text part.
    JSON strings of tool arguments become mappings, since templates write them out with `tojson`.
    """
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, str) and not calls and not parts:
        return message
    copy = dict(message)
    text = content if isinstance(content, str) else _join_parts(content or ())
    copy["content"] = [{"type": "text", "text": text}] if parts else text
    if calls:
        copy["tool_calls"] = [_with_arguments(call, _parsed) for call in calls]
    return copy


def _with_text_arguments(message: ChatMessage) -> ChatMessage:
    if not message.get("tool_calls"):
        return message
    calls = [_with_arguments(call, _dumped) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    function["arguments"] = change(function.get("arguments"))
    return {**call, "type": call.get("type", "function"), "function": function}


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments


def _dumped(arguments: Any) -> Any:
    return _to_json(arguments) if isinstance(arguments, dict) else arguments


def _join_parts(parts: Any) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") == "text":
            texts.append(part["text"])
        else:
            raise UnsupportedSetting(
                f"a message has a part of type {part.get('type')!r}; only text can be rendered "
                "into token ids here. Send such messages to a server that renders them itself."
            )
    return "\n".join(texts)


def _shorten(roles: list[Any]) -> str:
    shown = ", ".join(map(str, roles[:3] + ["..."] * (len(roles) > 6) + roles[3:][-3:]))
    return f"[{shown}]"
