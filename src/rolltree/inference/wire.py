"""The JSON of OpenAI-compatible completions, whole or in chunks, as structs that msgspec decodes.

Only fields that rolltree reads are here; all others are skipped without being built. A server
repeats the whole prompt's ids in every turn: `PromptReader` compares those it knows as bytes and
decodes the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from rolltree._helpers.untrusted import well_formed
from rolltree.values.errors import BadResponse
from rolltree.values.types import IntArray


class TokenLogprob(msgspec.Struct, gc=False):  # cannot be in a cycle, so the collector skips it
    """One sampled token of a chat completion."""

    logprob: float | None = None
    token: str = ""


class Logprobs(msgspec.Struct):
    """Logprobs of a choice: `content` for chat, `tokens` and `token_logprobs` for text."""

    content: list[TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class Message(msgspec.Struct):
    """An assistant message, or what a chunk adds to it.

    `sent_text`, `sent_calls` and `call_texts` read the fields, for servers send other data, too.
    """

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class Span(msgspec.Struct):
    """Tokens `[start, end)` were sampled from the weights called `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """One completion."""

    # Any type: `first_choice` checks it and reports what is wrong.
    index: Any = 0
    message: Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[Span] | None = None
    routed_experts: Any = None


class Usage(msgspec.Struct):
    """The server's token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Response(msgspec.Struct):
    """A chat or text completion."""

    choices: list[Choice]
    id: str | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ChunkChoice(Choice):
    """What a chunk adds to a completion: ids and logprobs are those of its tokens only."""

    delta: Message | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed completion; `error` takes the place of the rest."""

    choices: list[ChunkChoice] = []
    id: str | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_STRUCTS = frozenset(
    [Response, Chunk, Choice, ChunkChoice, Message, Logprobs, TokenLogprob, Usage, Span, type(None)]
)
AnyResponse = TypeVar("AnyResponse", Response, Chunk)
Decode: TypeAlias = Callable[[bytes], Response]
DecodeChunk: TypeAlias = Callable[[bytes], Chunk]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding bytes that are not JSON of this shape, or too deeply nested."""

_DECODER = msgspec.json.Decoder(Response)
_CHUNK_DECODER = msgspec.json.Decoder(Chunk)


def decode_response(body: bytes) -> Response:
    """Decode a completion.

    Raises:
        BadResponse: it is not JSON, or not of this shape.
    """
    return _decoded(_DECODER, body)


def decode_chunk(data: bytes) -> Chunk:
    """Decode one event of a streamed completion; raises as `decode_response`."""
    return _decoded(_CHUNK_DECODER, data)


def sent_text(value: Any) -> str:
    """Return what a server or a mock has in place of a text: parts are joined, as `sent_json` else.

    >>> sent_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if value is None:  # first, and texts second: every answer has a few of both
        return ""
    if isinstance(value, str):
        return value if value.isascii() else str(well_formed(value))
    if isinstance(value, list | tuple) and all(map(_is_text, value)):
        return "".join(sent_json(part["text"]) for part in value)
    return sent_json(value) if value else ""


def sent_json(value: Any) -> str:
    """Return a text as it is, other data as JSON; None and objects that JSON lacks become ""."""
    if not isinstance(value, str | dict | list | tuple | int | float):
        return ""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"({error})"
    # A model may write a lone surrogate, which can be neither stored nor sent: it becomes U+FFFD.
    return str(well_formed(text))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def sent_calls(value: Any) -> list[Any]:
    """Return what a server or a mock has in place of a list of tool calls as a list."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value] if value and isinstance(value, str | dict) else []


def call_texts(call: Any) -> tuple[str, str, str]:
    """Return the id, the name and the arguments of a tool call, "" for what it does not have.

    Other data becomes the arguments of a call without a name, about which the model is told.
    """
    if isinstance(call, str):
        with suppress(ValueError, RecursionError):
            call = json.loads(call)  # as data sets store it
    if isinstance(call, str | list | int | float):
        call = {"function": {"arguments": call}}
    function = read(call, "function")
    name, arguments = read(function, "name"), read(function, "arguments")
    return sent_text(read(call, "id")), sent_text(name), sent_json(arguments)


def read(value: object, name: str, otherwise: object = None) -> Any:
    """Return `value[name]` of a mapping or `value.name` of an object, or `otherwise`."""
    if type(value) in _STRUCTS:  # first, and faster than `isinstance`: every answer is read so
        return getattr(value, name, otherwise)
    # `dict` comes first because its check is faster.
    if isinstance(value, dict | Mapping):
        return value.get(name, otherwise)
    return getattr(value, name, otherwise)


def _integer(text: str) -> int | str:
    # The model may have written it. Python reads no longer ones, and no field of ours needs them.
    return int(text) if len(text) <= _MAX_DIGITS else text


_MAX_DIGITS = 4300


def _decoded(decoder: msgspec.json.Decoder[AnyResponse], body: bytes) -> AnyResponse:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        # What servers send nevertheless, and would send again: floats that are not finite, such as
        # logprobs of an engine that overflowed, lone surrogates that the model wrote.
        with suppress(ValueError, RecursionError, msgspec.ValidationError):
            text = body.decode("utf-8-sig", "replace")
            values = json.loads(text, parse_constant=lambda _: None, parse_int=_integer)
            return msgspec.convert(well_formed(values), decoder.type)
        start = body[:80].decode("utf-8", "replace")
        raise BadResponse(
            f"the server's answer is not a completion in JSON ({error}); it begins {start!r}. "
            "There is no answer to use. Is the base URL that of an OpenAI-compatible API?"
        ) from error


# As vLLM writes it, without spaces; other spellings are decoded in full.
_KEY = b'"prompt_token_ids":['
_MARK = -1
_NO_IDS: IntArray = np.empty(0, np.int32)


class PromptReader:
    """Decodes the responses of one conversation, but of each prompt only the new ids.

    If prompt ids begin, byte for byte, with those of the previous response, these are taken over;
    `prompt_token_ids` is then an int32 array. The rest of a response is always decoded.

    >>> reader = PromptReader()
    >>> first = reader.decode(b'{"choices":[],"prompt_token_ids":[5,6]}')
    >>> reader.decode(b'{"choices":[],"prompt_token_ids":[5,6,7]}').prompt_token_ids.tolist()
    [5, 6, 7]
    """

    __slots__ = ("_ids", "_text")

    def __init__(self) -> None:
        self._text = b""
        self._ids = _NO_IDS

    def decode(self, body: bytes) -> Response:
        """Decode a completion.

        Raises:
            BadResponse: it is not JSON, or not of this shape.
        """
        return self._decode(_DECODER, body)

    def decode_chunk(self, data: bytes) -> Chunk:
        """Decode one event of a streamed completion; raises as `decode`."""
        return self._decode(_CHUNK_DECODER, data)

    def _decode(self, decoder: msgspec.json.Decoder[AnyResponse], body: bytes) -> AnyResponse:
        start = body.rfind(_KEY) + len(_KEY)
        if start < len(_KEY) or body.startswith(b"]", start):
            return _decoded(decoder, body)
        # The mark takes the place of the known ids. Finding it as the first decoded id proves that
        # these bytes were the field and not, say, text that looks like it.
        text, known = self._text, self._ids
        # Compared with the next character, since 5 is not the beginning of 57.
        if text and body.startswith((text + b",", text + b"]"), start):
            marked = b"%b-1%b" % (body[:start], body[start + len(text) :])
        else:
            known = _NO_IDS
            marked = b"%b-1,%b" % (body[:start], body[start:])
        try:
            response = decoder.decode(marked)
            holder = _prompt_holder(response)
            ids = np.array(holder.prompt_token_ids or (0,), np.int32)
        # Decoded in full, so that an error is about the server's own bytes.
        except (*UNREADABLE, OverflowError):
            return _decoded(decoder, body)
        new = ids[1:]
        if ids[0] != _MARK or (len(new) and np.minimum.reduce(new) < 0):
            return _decoded(decoder, body)
        self._ids = np.concatenate((known, new))
        # Read-only, since records of several calls share it.
        self._ids.flags.writeable = False
        self._text = body[start : body.index(b"]", start)]
        holder.prompt_token_ids = self._ids  # type: ignore[assignment]
        return response


def _prompt_holder(response: Response | Chunk) -> Response | Chunk | Choice:
    """Return what has the prompt's ids: the response for chat, its choice for text."""
    if response.prompt_token_ids is None and response.choices:
        return response.choices[0]
    return response
