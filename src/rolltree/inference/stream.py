"""Streamed completions (server-sent events): passed on in chunks, then joined into one answer.

The chunks are put together as the `Response` that the server would have given at once, so a
streamed answer is read, checked and recorded like any other (design/0013-model-call-path.md). A
server whose chunks lack what its whole answers have gets requests without streaming.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolltree.inference.call import DeltaListener, ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.deltas import TokenListener
from rolltree.inference.http import HttpClient
from rolltree.inference.parse import extract_finish_reason, first_choice, names_ids
from rolltree.inference.retry import Outcome
from rolltree.inference.wire import (
    Choice,
    ChunkChoice,
    Decode,
    DecodeChunk,
    Logprobs,
    Message,
    Response,
    call_texts,
    read,
    sent_calls,
    sent_text,
)
from rolltree.values.errors import BadResponse, ServerError
from rolltree.values.types import ChatMessage

logger = logging.getLogger("rolltree.inference")
_REFUSALS = (400, 422)
"""How servers reject a field that they do not know, such as `stream`."""


class InexactStream(Exception):
    """A chunk has no ids or no logprobs, though they were requested."""


class EventReader:
    """Splits a stream into server-sent events and calls `take` with the data of each.

    >>> found = []
    >>> reader = EventReader(found.append)
    >>> for part in (b"data: on", b"e\\n", b"\\ndata:two\\r\\n\\r\\n: nothing\\n\\n"):
    ...     reader.feed(part)
    >>> found
    [b'one', b'two']
    """

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._parts: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> None:
        """Take a part of the stream."""
        self._parts.append(part)
        if b"\n" not in part:
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                self._take(data)


class StreamedCompletion:
    """Reads one streamed completion.

    Args:
        decode: decodes an event's data.
        follow: called with the choice of every chunk.
        is_exact: whether a choice has all that was requested; also called with whether the
            prompt's ids have arrived.
        check: called with the first event's data.
    """

    def __init__(
        self,
        decode: DecodeChunk,
        follow: Callable[[ChunkChoice], None],
        is_exact: Callable[[ChunkChoice, bool], bool],
        check: Callable[[bytes], None],
    ) -> None:
        self._decode, self._follow, self._is_exact, self._check = decode, follow, is_exact, check
        self._events = EventReader(self._take)
        self._has_begun = False
        self._whole = Response([])
        self._choices: list[ChunkChoice] = []
        self.failure: tuple[int, str] | None = None
        """The status and the text of an error that the server sent in the stream."""

    def feed(self, part: bytes) -> None:
        """Take a part of the stream, cut anywhere.

        Raises:
            BadResponse: an event is not a chunk of this answer.
            InexactStream: a chunk does not have all that was requested.
        """
        self._events.feed(part)

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]" or self.failure is not None:
            return
        if not self._has_begun:
            self._check(data)
            self._has_begun = True
        chunk = self._decode(data)
        if chunk.error is not None:
            self.failure = _failure_in(chunk.error)
            return
        whole = self._whole
        whole.id, whole.model = whole.id or chunk.id, whole.model or chunk.model
        whole.usage = chunk.usage or whole.usage
        if chunk.prompt_token_ids is not None:
            whole.prompt_token_ids = chunk.prompt_token_ids
        if not chunk.choices:  # the usage
            return
        choice = first_choice(chunk)
        assert isinstance(choice, ChunkChoice)
        self._choices.append(choice)
        has_prompt = whole.prompt_token_ids is not None or any(
            each.prompt_token_ids is not None for each in self._choices[:2]
        )
        if _says_something(choice) and not self._is_exact(choice, has_prompt):
            raise InexactStream
        self._follow(choice)

    def result(self) -> Response:
        """Return the answer.

        Raises:
            BadResponse: the stream ended before the answer did.
        """
        if self._choices:
            self._whole.choices = [_joined(self._choices)]
        extract_finish_reason(self._whole)
        return self._whole


@dataclass(slots=True)
class CompletionStream:
    """How one call follows its answer while it is streamed by `CompletionPosts`.

    `follow` returns, for each attempt, the function that is called with the choice of each chunk.
    """

    listener: DeltaListener
    follow: Callable[[], Callable[[ChunkChoice], None]]
    decode: DecodeChunk
    # Whether ids of the completion and of the prompt were requested.
    with_ids: bool
    with_prompt: bool

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer was passed on."""
        return self.listener.has_begun

    def reader(self, check: Callable[[bytes], None]) -> StreamedCompletion:
        """Return a reader for the stream of one attempt."""
        return StreamedCompletion(self.decode, self.follow(), self._is_exact, check)

    def _is_exact(self, choice: ChunkChoice, has_prompt: bool) -> bool:
        if not self.with_ids:
            return True
        if choice.token_ids is None:
            return names_ids(choice.logprobs)
        has_logprobs = choice.logprobs is not None or not choice.token_ids
        return has_logprobs and (has_prompt or not self.with_prompt)


def stream_of_tokens(
    call: ModelCall,
    renderer: ChatRenderer,
    decode: DecodeChunk,
    num_prompt_tokens: int,
    begun: str = "",
) -> CompletionStream | None:
    """Return the stream of a call whose answer is parsed here, from ids; None without a listener.

    The prompt is sent as ids; it has `begun`, the beginning of the answer.
    """
    if call.on_delta is None:
        return None
    listener = DeltaListener(call.on_delta)

    def follow() -> Callable[[ChunkChoice], None]:
        asked = replace(call, on_delta=listener)
        tokens = TokenListener(renderer, asked, begun, num_prompt_tokens)

        def take(choice: ChunkChoice) -> None:
            ids = choice.token_ids or ()
            values = _values_of(choice.logprobs) if call.reports_tokens else ()
            are_whole = len(values) == len(ids)
            for index, token in enumerate(ids):
                tokens.take(token, values[index] if are_whole else None)

        return take

    return CompletionStream(listener, follow, decode, with_ids=True, with_prompt=False)


def stream_of_messages(
    call: ModelCall, decode: DecodeChunk, *, with_ids: bool
) -> CompletionStream | None:
    """Return the stream of a call whose answer the server parses; None without a listener."""
    if call.on_delta is None:
        return None
    listener = DeltaListener(call.on_delta)
    with_prompt = isinstance(call.prompt, str | list)
    return CompletionStream(listener, lambda: _Heard(listener), decode, with_ids, with_prompt)


class _Heard:
    """Passes on the text of chunks, except reasoning after content: the whole answer has that."""

    def __init__(self, listener: DeltaListener) -> None:
        self._listener, self._has_content = listener, False

    def __call__(self, choice: ChunkChoice) -> None:
        delta = choice.delta or Message(choice.text)
        said: ChatMessage = {}
        reasoning = sent_text(delta.reasoning_content or delta.reasoning)
        if reasoning and not self._has_content:
            said["reasoning_content"] = reasoning
        if content := sent_text(delta.content):
            self._has_content = True
            said["content"] = content
        self._listener(said)


@dataclass(slots=True)
class CompletionPosts:
    """Posts completion requests to one server; remembers which paths can stream exactly."""

    server: HttpClient
    _streaming: set[str] = field(default_factory=set)
    _not_streaming: set[str] = field(default_factory=set)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        decode: Decode,
        stream: CompletionStream | None = None,
        *,
        at_root: bool = False,
    ) -> Outcome[Response]:
        """Send a request and return the complete answer, streamed if `stream` is given.

        Raises:
            ModelError: as `HttpClient.post` says.
        """

        def whole(body: bytes) -> Response:
            response = decode(body)
            # Checked here, so that an answer which was broken off is requested again.
            extract_finish_reason(response)
            return response

        if stream is None or path in self._not_streaming:
            return await self.server.post(path, body, whole, at_root=at_root)
        asked = {**body, "stream": True}
        if not at_root:  # the token-in endpoint returns ids, which can be counted
            asked["stream_options"] = {"include_usage": True}
        why = "its chunks lack ids or logprobs, which its whole answers may have"
        try:
            answer = await self.server.post(path, asked, whole, at_root=at_root, stream=stream)
        except InexactStream:
            self._not_streaming.add(path)
            if stream.has_begun:
                raise BadResponse(
                    f"{self.server.base_url}{path} streamed a part of an answer with ids and the "
                    "rest without them, so it is not known what the model sampled. The call is "
                    "lost; later calls do not stream."
                ) from None
        except ServerError as error:
            if stream.has_begun:  # no other form of the request may be tried
                raise BadResponse(f"the answer broke off after a part of it: {error}") from error
            if path in self._streaming or error.status not in _REFUSALS:
                raise
            why = f"it answered {error.status}: {error}"
        else:
            self._streaming.add(path)
            return answer
        answer = await self.server.post(path, body, whole, at_root=at_root)
        # Only now, since the server may have rejected a different field.
        self._not_streaming.add(path)
        logger.warning(
            "%s%s cannot stream exactly (%s): its answers come as a whole.",
            self.server.root_url if at_root else self.server.base_url,
            path,
            why,
        )
        return answer


def _values_of(logprobs: Logprobs | None) -> Sequence[float | None]:
    """Return the logprobs of a chunk's tokens, which it has in one of two shapes."""
    if logprobs is None:
        return ()
    return logprobs.token_logprobs or [each.logprob for each in logprobs.content or ()]


def _failure_in(error: object) -> tuple[int, str]:
    """Return the status and text of an error object; only vLLM's `code` is an HTTP status."""
    found = error if isinstance(error, dict) else {"message": str(error)}
    code, text = found.get("code"), str(found.get("message", ""))
    if type(code) is int and 400 <= code < 600:
        return code, text
    return (400 if found.get("type") == "invalid_request_error" else 500), text


def _says_something(choice: ChunkChoice) -> bool:
    delta = choice.delta or Message(choice.text)
    said = (delta.content, delta.reasoning_content, delta.reasoning, delta.tool_calls)
    return any(said) or choice.finish_reason is not None or bool(choice.token_ids)


def _joined(chunks: list[ChunkChoice]) -> Choice:
    """Return the choice that the chunks add up to."""
    whole = Choice()
    for name in ("prompt_token_ids", "finish_reason", "stop_reason", "weight_versions"):
        setattr(whole, name, _last(chunks, name))
    whole.routed_experts = _last(chunks, "routed_experts")
    whole.logprobs = _joined_logprobs([each.logprobs for each in chunks if each.logprobs])
    ids = [each.token_ids for each in chunks if each.token_ids is not None]
    if ids:
        whole.token_ids = [token for part in ids for token in part]
    texts = [each.text for each in chunks if each.text is not None]
    if texts:
        whole.text = "".join(texts)
    deltas = [each.delta for each in chunks if each.delta is not None]
    if deltas:
        whole.message = Message(
            "".join(sent_text(delta.content) for delta in deltas),
            "".join(sent_text(delta.reasoning_content or delta.reasoning) for delta in deltas),
            tool_calls=_joined_calls([c for delta in deltas for c in sent_calls(delta.tool_calls)]),
        )
    return whole


def _last(chunks: list[ChunkChoice], name: str) -> Any:
    found = (getattr(chunk, name) for chunk in reversed(chunks))
    return next((value for value in found if value is not None), None)


def _joined_logprobs(parts: list[Logprobs]) -> Logprobs | None:
    if not parts:
        return None
    whole = Logprobs()
    for name in ("content", "tokens", "token_logprobs"):
        lists = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        if lists:
            setattr(whole, name, [entry for each in lists for entry in each])
    return whole


def _joined_calls(parts: list[Any]) -> list[dict[str, Any]]:
    calls: dict[int, tuple[str, str, str]] = {}
    for part in parts:
        index = read(part, "index", 0)
        at = index if isinstance(index, int) else 0
        known, new = calls.get(at, ("", "", "")), call_texts(part)
        calls[at] = (known[0] or new[0], known[1] + new[1], known[2] + new[2])
    return [
        {"id": identifier, "function": {"name": name, "arguments": arguments}}
        for _, (identifier, name, arguments) in sorted(calls.items())
    ]
