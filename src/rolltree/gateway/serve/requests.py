"""Parses the server's requests: the fields of each endpoint, their sampling settings, and errors.

A field is used, or does not affect the answer (`user`, `metadata`), or must have the value that
describes the server's only behaviour. Anything else is an error that names the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from reprlib import repr as shown
from typing import Any, cast

import msgspec

from rolltree._helpers.untrusted import shorten
from rolltree.inference.client import sampling_from_args
from rolltree.inference.request_fields import FIELDS
from rolltree.inference.template import TemplateError
from rolltree.values.errors import (
    ConfigError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
    did_you_mean,
    message_of,
)
from rolltree.values.types import ChatMessage, SamplingParams
from rolltree.web.guard import RequestError

# Errors that the same request would raise again, so that a client must not retry it.
_CLIENT_ERRORS = (ConfigError, PromptTooLong, TokenError, UnsupportedSetting, TemplateError)
_CODES = {
    401: "invalid_api_key",
    403: "admin_key_required",
    404: "not_found",
    408: "request_timeout",
    413: "request_too_large",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a failed request: HTTP status, code, message and the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None


def failure_of_request(error: Exception) -> Failure:
    """Return the failure that is reported to the client for an exception."""
    status, code = 500, "internal_error"
    if isinstance(error, RequestError):
        status, code = error.status, _CODES.get(error.status, "invalid_request")
    elif isinstance(error, PromptTooLong):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, _CLIENT_ERRORS):
        status, code = 400, "invalid_request"
    # Messages quote values of the request, which can be megabytes.
    message = shorten(message_of(error), _MAX_MESSAGE)
    return Failure(status, code, message, getattr(error, "param", None))


def openai_error(failure: Failure) -> dict[str, Any]:
    """Return a failure in the format of OpenAI's servers."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and OpenAI's error object for an exception."""
    failure = failure_of_request(error)
    return failure.status, openai_error(failure)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENGINES = _names(
    "min_p min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias"
)
"""What the embedded engine does beside the settings of `SamplingParams`."""
_SAMPLING = _ENGINES.union(name for name, field in FIELDS.items() if field.kind == "setting")
# Fields that do not affect the answer.
_HARMLESS = frozenset(name for name, field in FIELDS.items() if field.kind == "note")
# Values that request what this server does anyway, accepted because clients send their defaults.
_NEUTRAL = {
    name: field.neutral
    for name, field in FIELDS.items()
    if field.kind in ("shaping", "answer") and field.neutral and name not in _ENGINES
}
_COMMON = (_SAMPLING | _HARMLESS | _NEUTRAL.keys() | {"model", "n"}) - {"tool_choice"}
_ANSWER = _names("stream stream_options logprobs return_token_ids return_tokens_as_token_ids")
CHAT_FIELDS = _COMMON | _ANSWER | {"messages", "tools", "tool_choice"}
TEXT_FIELDS = _COMMON | _ANSWER | {"prompt"}
SAMPLING_PARAMS_FIELDS = _COMMON - {"model"} | {"logprobs"}
GENERATE_FIELDS = _HARMLESS | _names(
    "token_ids sampling_params model return_token_ids stream stream_options priority"
)
TOKENIZE_FIELDS = _names(
    "model prompt messages tools tool_choice add_generation_prompt return_token_strs "
    "add_special_tokens continue_final_message chat_template_kwargs"
)
# OpenAI's default for text completions.
TEXT_MAX_TOKENS = 16
_MAX_CHOICES = 256
# Limited because every token is compared with all entries, in the thread that decodes all requests.
_MAX_ENTRIES = {"stop": 4096, "stop_token_ids": 1024}
_MOST_STOP_CHARACTERS = 4096
_MAX_MESSAGE = 2000
# The most completions of one request: prompts times `n`.
MAX_COMPLETIONS = 1024


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The settings of a completion request, without its prompt."""

    sampling: SamplingParams
    chat: bool
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    request_id: str = ""


def check_fields(body: Mapping[str, Any], known: frozenset[str], model: str) -> dict[str, Any]:
    """Return the fields that are given (not null), and refuse those that would be ignored.

    Raises:
        RequestError: a field is unknown or too long, has a value that would be ignored, or names
            a different model.
    """
    # Null means "not given" in OpenAI's API.
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise unknown_field(name, known)
        is_checked = name in _NEUTRAL and name != "tool_choice"
        if is_checked and not is_one_of(value, _NEUTRAL[name]):
            raise RequestError(
                f"the embedded engine does not support {name} = {shown(value)} and would "
                "ignore it. Leave it out, or use a server that supports it (vLLM).",
                param=name,
            )
        if name in _MAX_ENTRIES and isinstance(value, Sized) and len(value) > _MAX_ENTRIES[name]:
            raise RequestError(
                f"{name} has {len(value):,} entries or characters, and every token is compared "
                f"with them; at most {_MAX_ENTRIES[name]:,} are allowed.",
                param=name,
            )
    if given.get("model", model) != model:
        raise RequestError(
            f"The model {shown(given['model'])} does not exist here; this server has {model!r}.",
            status=404,
            param="model",
        )
    return given


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Return whether a field has one of the values; unlike in Python, `True` is not the number 1.

    >>> is_one_of(1.0, (1,)), is_one_of(True, (1,))
    (True, False)
    """
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def unknown_field(name: str, known: Collection[str]) -> RequestError:
    """Return the error for a field that the server does not know."""
    return RequestError(
        f"the field {shown(name)} is unknown here and would be ignored."
        + did_you_mean(name, known),
        param=name[:100],
    )


def parse_request(
    given: Mapping[str, Any], *, chat: bool, body: Mapping[str, Any], request_id: str = ""
) -> ParsedRequest:
    """Parse the checked fields of a chat or text completion.

    `body` is the unchecked request: `max_tokens: null` means no limit, while leaving it out of a
    text completion means 16. `request_id` is the client's own id (`X-Request-Id`).

    Raises:
        RequestError: a value cannot be used.
    """
    logprobs = given.get("logprobs", False)
    if logprobs not in ((True, False) if chat else (0, 1)):
        raise RequestError(
            f"logprobs = {shown(logprobs)}: only logprobs of sampled tokens are supported. Use "
            + ("true." if chat else "0 or 1."),
            param="logprobs",
        )
    include_usage = includes_usage(given)
    sampling = sampling_of(given)
    # Null means no limit here, so this looks for the key and not for the value.
    if not chat and not {"max_tokens", "max_completion_tokens"} & body.keys():
        sampling = replace(sampling, max_tokens=TEXT_MAX_TOKENS)
    return ParsedRequest(
        sampling=sampling,
        chat=chat,
        tools=tools_of(given) if chat else None,
        n=num_choices(given),
        stream=flag(given, "stream"),
        include_usage=include_usage,
        logprobs=bool(logprobs) if chat else "logprobs" in given and logprobs is not False,
        token_ids=flag(given, "return_token_ids"),
        tokens_as_ids=flag(given, "return_tokens_as_token_ids"),
        request_id=request_id or secrets.token_hex(12),
    )


def includes_usage(given: Mapping[str, Any]) -> bool:
    """Return whether `stream_options` request the usage at the end of the stream.

    Raises:
        RequestError: they request anything else.
    """
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError(
            f"stream_options = {shown(options)} has something other than include_usage, which "
            "would be ignored.",
            param="stream_options",
        )
    return flag(options, "include_usage")


def sampling_of(given: Mapping[str, Any], names: Collection[str] = _SAMPLING) -> SamplingParams:
    """Return the sampling settings of checked fields; fields not in `names` are skipped.

    Raises:
        RequestError: a value cannot be used.
    """
    try:
        sampling = sampling_from_args({name: given[name] for name in given if name in names})
    except ConfigError as error:
        raise RequestError(str(error)) from error
    if sum(map(len, sampling.stop)) > _MOST_STOP_CHARACTERS:
        raise RequestError(
            f"the stop strings have more than {_MOST_STOP_CHARACTERS:,} characters in all, and "
            "every token is compared with them. Shorten them.",
            param="stop",
        )
    return sampling


def num_choices(given: Mapping[str, Any]) -> int:
    """Return `n`, the number of completions per prompt."""
    n = given.get("n", 1)
    # True is an int in Python.
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MAX_CHOICES:
        raise RequestError(f"n = {shown(n)} is not a number from 1 to {_MAX_CHOICES}.", param="n")
    return n


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[str | _Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


def messages_of(value: object) -> list[ChatMessage]:
    """Return `value` if it is a list of chat messages.

    Raises:
        RequestError: it is not; the message names the place.
    """
    try:
        # Only checked, not converted: templates read fields that are not listed here.
        msgspec.convert(value, list[_Message])
    except msgspec.ValidationError as error:
        raise RequestError(
            f"messages is not a list of chat messages: {error}.", param="messages"
        ) from error
    return cast(list[ChatMessage], value)


def tools_of(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call, or None.

    Raises:
        RequestError: they are not a list of tools, or `tool_choice` forces a call.
    """
    tools, choice = given.get("tools"), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice = {shown(choice)} needs constrained decoding, which the embedded engine "
            "does not have; the model would be free not to call. Use 'auto' or 'none'.",
            param="tool_choice",
        )
    if tools is not None and not (isinstance(tools, list) and all(map(is_tool, tools))):
        raise RequestError("tools is not a list of function tools.", param="tools")
    return tools if tools and choice == "auto" else None


def is_tool(tool: object) -> bool:
    """Whether `tool` is a function tool in OpenAI's format."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the value of a boolean field; `default` if it is not given, or null.

    Raises:
        RequestError: it is not a boolean.
    """
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {shown(value)} is neither true nor false.", param=name)
    return value
