"""The JSON of OpenAI-compatible completions, as structs that msgspec decodes in one pass.

Only fields that somebody reads are here; all others are skipped without being built. It knows
vLLM's token id fields. It leaves out streaming and requests, which are plain dicts.
"""

from __future__ import annotations

import msgspec

from rolltree.errors import BadResponse


class TokenLogprob(msgspec.Struct):
    """One sampled token of a chat completion."""

    logprob: float | None = None
    token: str = ""


class Logprobs(msgspec.Struct):
    """Logprobs of a choice: `content` for chat, `tokens` and `token_logprobs` for text."""

    content: list[TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class Function(msgspec.Struct):
    """What a tool call names; `arguments` is JSON text."""

    name: str = ""
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call that the server parsed."""

    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    """An assistant message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Span(msgspec.Struct):
    """Tokens `[start, end)` were sampled from the weights called `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """One completion."""

    message: Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[Span] | None = None


class Usage(msgspec.Struct):
    """How many tokens the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Response(msgspec.Struct):
    """A chat or text completion."""

    choices: list[Choice]
    id: str | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(Response)


def decode_response(body: bytes) -> Response:
    """Decode a completion.

    Raises:
        BadResponse: it is not JSON, or not of this shape.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = body[:80].decode("utf-8", "replace")
        raise BadResponse(
            f"the server's answer is not a completion in JSON ({error}); it begins {start!r}. "
            "There is no answer to use. Is the base URL that of an OpenAI-compatible API?"
        ) from error
