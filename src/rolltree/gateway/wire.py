"""HTTP of the gateway and of `rolltree serve`: paths, calls in any protocol, streams, failures.

Errors have the shape that the request's protocol defines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rolltree.gateway.anthropic_messages import MESSAGES
from rolltree.gateway.calls import (
    AgentAnswer,
    AgentCall,
    AnswerDelta,
    AnswerHead,
    CallOrigin,
    Connection,
)
from rolltree.gateway.failures import Failure, failure_of_request, openai_error
from rolltree.gateway.fields import without_fields
from rolltree.gateway.openai_chat import CHAT, TEXT
from rolltree.gateway.openai_responses import RESPONSES
from rolltree.gateway.protocol import Answering, EventWriter, WireProtocol
from rolltree.web.answers import Handler, answering_errors, error_response, json_response
from rolltree.web.guard import RequestError
from rolltree.web.limits import ClientLeft, has_left, object_in, request_body, while_connected

logger = logging.getLogger("rolltree.gateway")
PROTOCOLS: tuple[WireProtocol, ...] = (CHAT, TEXT, RESPONSES, MESSAGES)
PING_S = 15.0
"""Seconds without an event after which a stream gets a ping, to keep the connection open."""
WRITE_TIMEOUT_S = 120.0
SESSION = "rolltree.session"
"""The key of a request's scope with what answers its calls."""
_CONNECTION = "rolltree.connection"
# Headers with the number of an attempt, and that of the first: OpenAI's and Anthropic's clients,
# AWS's, and Envoy, which repeats requests itself.
_ATTEMPTS = (
    ("x-stainless-retry-count", re.compile(r"^\d{1,3}$"), 0),
    ("amz-sdk-request", re.compile(r"(?<=attempt=)\d{1,3}"), 1),
    ("x-envoy-attempt-count", re.compile(r"^\d{1,3}$"), 1),
)


class Paths:
    """The handlers by method and path. `{name}` matches one segment, `{name:path}` the rest.

    A dictionary instead of a router's list, since every call is looked up here.
    """

    def __init__(self, routes: Iterable[tuple[str, str, Handler]]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], str, Handler]] = []
        for method, path, handler in routes:
            if "{" not in path:
                self._exact.setdefault(path, {})[method] = handler
                continue
            pattern = re.sub(r"{(\w+):path}", r"(?P<\1>.+)", path)
            pattern = re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern)
            self._patterns.append((re.compile(pattern), method, handler))

    def find(self, method: str, path: str) -> tuple[Handler, dict[str, str]]:
        """Return the handler of a request, and the named parts of its path.

        Raises:
            RequestError: nothing is served at this path, or not for this method.
        """
        method = "GET" if method == "HEAD" else method
        known = self._exact.get(path, {})
        if method in known:
            return known[method], {}
        is_known = bool(known)
        for pattern, other, handler in self._patterns:
            found = pattern.fullmatch(path)
            if found is not None and other == method:
                return handler, found.groupdict()
            is_known = is_known or found is not None
        what = f"{method} {path} is not served here"
        raise RequestError(what, status=405 if is_known else 404)


class WireApp(ABC):
    """An ASGI application that admits requests before their body is read, and answers them."""

    def __init__(self, read_timeout_s: float, write_timeout_s: float) -> None:
        self.state = SimpleNamespace(read_timeout_s=read_timeout_s, write_timeout_s=write_timeout_s)

    @abstractmethod
    def admitted(self, scope: Scope) -> Handler:
        """Return the handler of a request, or raise `RequestError`; sets `SESSION` in the scope."""

    def failure(self, error: Exception) -> Failure:
        """Return the failure that a client gets for an exception."""
        return failure_of_request(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        scope["app"] = self
        scope[_CONNECTION] = connection = Connection()
        try:
            await self._answer(scope, receive, send)
        finally:
            connection.is_open = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            handler = self.admitted(scope)
        except RequestError as error:
            response = self.failed(scope, error, _protocol_at(scope["path"]))
        else:
            response = await handler(Request(scope, receive, send))
        try:
            await response(scope, receive, send)
        except TimeoutError:
            logger.info("a client does not read its answer from %s", scope["path"])

    def failed(
        self, scope: Scope, error: Exception, protocol: WireProtocol | None = None
    ) -> Response:
        """Return the response to a failed request, and log what is not the client's fault."""
        failure = self.noted(scope, error)
        body = openai_error(failure) if protocol is None else protocol.error(failure)
        response = error_response(failure.status, body, closing=(401, 408, 413, 421))
        if failure.status < 500:
            response.headers["x-should-retry"] = "false"
        return response

    def noted(self, scope: Scope, error: Exception) -> Failure:
        """Return the failure for an exception, and log what is not the client's fault."""
        failure = self.failure(error)
        if failure.status >= 500:
            logger.warning("%s failed: %s", scope["path"], error, exc_info=error)
        return failure


def _protocol_at(path: str) -> WireProtocol | None:
    return next((each for each in PROTOCOLS if f"/v1{each.path}" in path), None)


def answering(handler: Handler, protocol: WireProtocol | None = None) -> Handler:
    """Wrap a handler so that the application answers for its exceptions."""

    def fail(request: Request, error: Exception) -> Response:
        response: Response = request.app.failed(request.scope, error, protocol)
        return response

    return answering_errors(handler, fail)


# -- calls ---------------------------------------------------------------------------------------


def asking(protocol: WireProtocol) -> Handler:
    """Return the handler of calls in a protocol."""

    async def ask(request: Request) -> Response:
        session: Answering = request.scope[SESSION]
        content = await request_body(request)
        body, dropped = without_fields(object_in(content), session.drop_fields)
        call = protocol.read(body, session)
        if dropped:
            call = replace(call, notes={**call.notes, **dropped})
        origin = _origin(request, protocol, content)
        if call.stream:
            return EventStream(request, protocol, session, call, origin)
        answers = await while_connected(request, session.answers(call, origin))
        body = await session.write(call, partial(protocol.write, call, answers))
        return AnswerResponse(request, body, session, answers)

    return answering(ask, protocol)


def _origin(request: Request, protocol: WireProtocol, content: bytes) -> CallOrigin:
    headers = request.headers
    if not request.scope[SESSION].keeps_answers:
        name = headers.get("x-request-id", "")[:128] if protocol.echoes_id else ""
        return CallOrigin(request_id=name)
    agent = request.path_params.get("agent") or headers.get("x-rolltree-agent", "")
    if len(agent) > 100:
        raise RequestError("the agent's name has more than 100 characters.")
    key = headers.get("idempotency-key")
    digest = hashlib.blake2b(f"{protocol.name}\0{agent}\0".encode(), digest_size=16)
    digest.update(content)
    return CallOrigin(
        agent,
        None if key is None else key[:200],
        _attempt(headers),
        digest.digest(),
        request.scope[_CONNECTION],
    )


def _attempt(headers: Headers) -> int | None:
    """Return the number of earlier attempts that a client or a proxy reports; None: it does not."""
    for name, number, first in _ATTEMPTS:
        found = number.search(headers.get(name, ""))
        # Behind a proxy that counts its own attempts, a first one may still be a client's retry.
        if found is not None and (int(found[0]) > first or not first):
            return int(found[0]) - first
    return None


class AnswerResponse(Response):
    """The answers to a request as one JSON body; they count as delivered when all of it is sent."""

    def __init__(
        self, request: Request, body: Any, session: Answering, answers: list[AgentAnswer]
    ) -> None:
        super().__init__(msgspec.json.encode(body), media_type="application/json")
        self._request, self._session, self._answers = request, session, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, unless the client has left."""
        # Checked first: after a complete response, uvicorn always reports that the client left.
        if has_left(receive):
            return
        async with asyncio.timeout(self._request.app.state.write_timeout_s):
            await super().__call__(scope, receive, send)
        for answer in self._answers:
            self._session.delivered(answer)


class EventStream(Response):
    """An answer as server-sent events, as it is sampled.

    A failure before the first event is a plain response with an error status. A client that hangs
    up, or does not read for `write_timeout_s`, ends its sampling.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        protocol: WireProtocol,
        session: Answering,
        call: AgentCall,
        origin: CallOrigin,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._request, self._protocol, self._session = request, protocol, session
        self._call, self._origin = call, origin
        self._has_begun = False
        self._sending, self._sent_s = asyncio.Lock(), time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer ends or the client leaves."""
        with suppress(ClientLeft):
            await while_connected(self._request, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._protocol.events(self._call)
        stream = self._session.stream(self._call, self._origin)
        answers, app = list[AgentAnswer](), self._request.app
        async with aclosing(stream):
            try:
                answers = await self._send_events(stream, writer, send)
            except Exception as error:  # becomes an answer or an event
                if isinstance(error, TimeoutError):
                    raise
                if not self._has_begun:
                    await app.failed(scope, error, self._protocol)(scope, receive, send)
                    return
                for event in writer.fail(app.noted(scope, error)):
                    await self._send(send, event)
        await self._send(send, b"", more=False)
        for answer in answers:
            self._session.delivered(answer)

    async def _send_events(
        self,
        stream: AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None],
        writer: EventWriter,
        send: Send,
    ) -> list[AgentAnswer]:
        head = await anext(stream)
        assert isinstance(head, AnswerHead)
        answers = list[AgentAnswer]()
        # Beside this task, which waits for the next part itself: every task between the engine and
        # the socket costs a turn of the loop, which an engine in this process holds up.
        pings = asyncio.ensure_future(self._ping(head, writer, send))
        try:
            async for part in stream:
                size = part.num_prompt_tokens
                async with self._sending:
                    await self._begin(replace(head, num_prompt_tokens=size), writer, send)
                    for event in _events_of(part, writer):
                        await self._send(send, event)
                if isinstance(part, AgentAnswer):
                    answers.append(part)
        finally:
            pings.cancel()
            await asyncio.wait((pings,))
        return answers

    async def _ping(self, head: AnswerHead, writer: EventWriter, send: Send) -> None:
        while True:
            await asyncio.sleep(self._sent_s + PING_S - time.monotonic())
            if time.monotonic() < self._sent_s + PING_S:
                continue
            async with self._sending:
                await self._begin(head, writer, send)
                await self._send(send, self._protocol.ping)

    async def _begin(self, head: AnswerHead, writer: EventWriter, send: Send) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for event in writer.begin(head):
            await self._send(send, event)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self._request.app.state.write_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent_s = time.monotonic()


def _events_of(
    part: AnswerHead | AnswerDelta | AgentAnswer, writer: EventWriter
) -> Iterable[bytes]:
    if isinstance(part, AgentAnswer):
        return writer.end(part)
    assert isinstance(part, AnswerDelta)
    return writer.delta(part)


def beside(protocol: WireProtocol, side: Any) -> Handler:
    """Return the handler of a further path of a protocol."""

    async def answer(request: Request) -> Response:
        content = await request_body(request)
        session: Answering = request.scope[SESSION]
        body, _ = without_fields(object_in(content) if content else {}, session.drop_fields)
        params = {**request.query_params, **request.path_params}
        return json_response(await side(session, body, params))

    return answering(answer, protocol)


def model_card(session: Answering, name: str | None = None) -> dict[str, Any]:
    """Return the description of a session's model with the fields of both APIs' `/models`."""
    created = int(session.opened_s)
    return {
        "id": name or session.model_name,
        "object": "model",
        "created": created,
        "owned_by": "rolltree",
        "type": "model",
        "display_name": session.model_name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
    }


def models_response(card: Mapping[str, Any]) -> Response:
    """Return the list of models, which has one."""
    name = card["id"]
    paging = {"has_more": False, "first_id": name, "last_id": name}
    return json_response({"object": "list", "data": [card], **paging})
