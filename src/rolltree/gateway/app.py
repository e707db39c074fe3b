"""The gateway's ASGI application: access, routes, streams, and sessions over HTTP.

    /s/ID/v1/...               a session's agent, with the session's secret
    /s/ID/agents/NAME/v1/...   the same for one of several agents of the session
    /sessions, /sessions/ID    opens, shows and closes sessions, with the admin key
    /health

Errors have the shape that the request's protocol defines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rolltree._helpers.redact import redact_text
from rolltree.environments.tools import side_by_side
from rolltree.gateway.anthropic_messages import MESSAGES
from rolltree.gateway.calls import (
    AgentAnswer,
    AgentCall,
    AnswerDelta,
    AnswerHead,
    CallOrigin,
    Connection,
)
from rolltree.gateway.openai_chat import CHAT, TEXT
from rolltree.gateway.openai_responses import RESPONSES
from rolltree.gateway.protocol import EventWriter, WireProtocol
from rolltree.gateway.serve.requests import (
    Failure,
    failure_of_request,
    openai_error,
)
from rolltree.gateway.session import GatewaySession
from rolltree.values.errors import (
    CallTimeout,
    ConnectionFailed,
    ModelError,
    ServerError,
    StoreError,
)
from rolltree.web.answers import Handler, answering_errors, error_response, json_response
from rolltree.web.guard import RequestError, digest_of, foreign_request, has_digest, key_in
from rolltree.web.limits import ClientLeft, has_left, object_in, request_body, while_connected

if TYPE_CHECKING:
    from rolltree.gateway.server import Gateway

logger = logging.getLogger("rolltree.gateway")
PROTOCOLS: tuple[WireProtocol, ...] = (CHAT, TEXT, RESPONSES, MESSAGES)
PING_S = 15.0
"""Seconds without an event after which a stream gets a ping, to keep the connection open."""
_SESSION = "rolltree.session"
_CONNECTION = "rolltree.connection"
_AGENT_PATH = re.compile(r"/s/([^/]+)(?:/agents/([^/]+))?/v1(/.+)|/s/([^/]+)/.*", re.DOTALL)
# URLs, and a host or an address with a port, as errors of connections name them.
_ADDRESS = re.compile(
    r"""https?://[^\s'")\]}]+|\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b|\b\d{1,3}(?:\.\d{1,3}){3}\b"""
    r"""|\[[\da-fA-F:]*:[\da-fA-F:]+\](?::\d+)?"""
)
_STATUS_OF_MODEL = (
    (CallTimeout, 504, "upstream_timeout"),
    (ConnectionFailed, 503, "upstream_unavailable"),
    (StoreError, 507, "not_stored"),
)


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


class GatewayApp:
    """The ASGI application; `hosts` are the `Host` headers that are answered.

    Requests are refused before their body is read: a foreign `Host` with 421, an `Origin` with 403.
    An unknown session and a wrong secret give the same 401, which does not reveal what sessions
    exist.
    """

    def __init__(self, gateway: Gateway, hosts: Collection[str]) -> None:
        self._gateway, self._hosts = gateway, frozenset(hosts)
        self._admin_key = digest_of(gateway.admin_key)
        self.state = SimpleNamespace(
            read_timeout_s=gateway.read_timeout_s, write_timeout_s=gateway.write_timeout_s
        )
        admin = SessionHandlers(gateway)
        self._agents = Paths(_agent_routes())
        self._others = Paths(
            [
                ("GET", "/health", _health),
                ("POST", "/sessions", _answering(admin.open)),
                ("GET", "/sessions", _answering(admin.list)),
                ("GET", "/sessions/{session}", _answering(admin.show)),
                ("DELETE", "/sessions/{session}", _answering(admin.drop)),
                ("POST", "/sessions/{session}/close", _answering(admin.close)),
            ]
        )

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
            handler = self._admitted(scope)
        except RequestError as error:
            response = _failed(error, _protocol_at(scope["path"]))
        else:
            response = await handler(Request(scope, receive, send))
        try:
            await response(scope, receive, send)
        except TimeoutError:
            logger.info("a client does not read its answer from %s", scope["path"])

    def _admitted(self, scope: Scope) -> Handler:
        """Return the handler of a request, or raise `RequestError`."""
        headers, path = scope["headers"], scope["path"]
        # A Unix socket has no host name, so DNS rebinding cannot reach it.
        # Older releases of uvicorn leave out its address.
        if (scope.get("server") or (None, None))[1] is not None:
            refusal = foreign_request(headers, self._hosts)
            if refusal is not None:
                raise refusal
        found, paths = _AGENT_PATH.fullmatch(path), self._others
        if found is not None:
            session = self._gateway.sessions.get(found[1] or found[4])
            if session is None or not session.has_key(key_in(headers)):
                raise RequestError(
                    "no open session has this address and this key. Send the session's own key, as "
                    "a bearer token or as x-api-key.",
                    status=401,
                )
            scope[_SESSION] = session
            paths, path = self._agents, found[3] or path
        elif path != "/health" and not has_digest(key_in(headers), self._admin_key):
            raise RequestError(
                "the request has no valid admin key. Send the one that the gateway was started "
                "with as a bearer token.",
                status=401,
            )
        handler, named = paths.find(scope["method"], path)
        if found is not None and found[2]:
            named["agent"] = found[2]
        scope["path_params"] = named
        return handler


def _agent_routes() -> Iterable[tuple[str, str, Handler]]:
    yield "GET", "/models", _answering(_models)
    yield "GET", "/models/{name:path}", _answering(_model)
    for protocol in PROTOCOLS:
        yield "POST", protocol.path, _answering(_asking(protocol), protocol)
        for (method, path), side in protocol.sides.items():
            yield method, path, _answering(_beside(side), protocol)


def _protocol_at(path: str) -> WireProtocol | None:
    return next((each for each in PROTOCOLS if f"/v1{each.path}" in path), None)


# -- calls ---------------------------------------------------------------------------------------


def _asking(protocol: WireProtocol) -> Handler:
    async def ask(request: Request) -> Response:
        session: GatewaySession = request.scope[_SESSION]
        content = await request_body(request)
        call = protocol.read(object_in(content), session)
        origin = _origin(request, protocol, content)
        if call.stream:
            return EventStream(request, protocol, session, call, origin)
        answers = await while_connected(request, _answers(session, call, origin))
        return AnswerResponse(request, protocol.write(call, answers), session, answers)

    return ask


async def _answers(
    session: GatewaySession, call: AgentCall, origin: CallOrigin
) -> list[AgentAnswer]:
    if call.n == 1:
        return [await session.complete(call, origin)]
    # Each answer is a separate call, and a repeated request finds each of them again.
    origins = [
        replace(
            origin,
            key=None if origin.key is None else f"{origin.key}#{index}",
            digest=hashlib.blake2b(origin.digest + bytes([index % 256]), digest_size=16).digest(),
        )
        for index in range(call.n)
    ]
    return await side_by_side([session.complete(call, each) for each in origins])


def _origin(request: Request, protocol: WireProtocol, content: bytes) -> CallOrigin:
    headers = request.headers
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
        self, request: Request, body: Any, session: GatewaySession, answers: list[AgentAnswer]
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
        session: GatewaySession,
        call: AgentCall,
        origin: CallOrigin,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._request, self._protocol, self._session = request, protocol, session
        self._call, self._origin = call, origin
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer ends or the client leaves."""
        with suppress(ClientLeft):
            await while_connected(self._request, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._protocol.events(self._call)
        stream = self._session.stream(self._call, self._origin)
        answer: AgentAnswer | None = None
        async with aclosing(stream):
            try:
                answer = await self._send_events(stream, writer, send)
            except Exception as error:  # becomes an answer or an event
                if isinstance(error, TimeoutError):
                    raise
                _log_failure(self._request, error)
                if not self._has_begun:
                    await _failed(error, self._protocol)(scope, receive, send)
                    return
                for event in writer.fail(failure_of_gateway(error)):
                    await self._send(send, event)
        await self._send(send, b"", more=False)
        if answer is not None:
            self._session.delivered(answer)

    async def _send_events(
        self,
        stream: AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None],
        writer: EventWriter,
        send: Send,
    ) -> AgentAnswer | None:
        head = await anext(stream)
        assert isinstance(head, AnswerHead)
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(stream, None))
                done, _ = await asyncio.wait((coming,), timeout=PING_S)
                news = coming.result() if done else None
                if not self._has_begun:
                    await self._begin(writer.begin(head), send)
                if not done:
                    await self._send(send, self._protocol.ping)
                    continue
                coming = None
                if isinstance(news, AgentAnswer):
                    for event in writer.end(news):
                        await self._send(send, event)
                    return news
                assert isinstance(news, AnswerDelta)
                for event in writer.delta(news):
                    await self._send(send, event)
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))

    async def _begin(self, events: Iterable[bytes], send: Send) -> None:
        self._has_begun = True
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        for event in events:
            await self._send(send, event)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self._request.app.state.write_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})


def _beside(side: Any) -> Handler:
    async def answer(request: Request) -> Response:
        content = await request_body(request)
        body = object_in(content) if content else {}
        params = {**request.query_params, **request.path_params}
        return json_response(await side(request.scope[_SESSION], body, params))

    return answer


async def _models(request: Request) -> Response:
    card = _model_card(request.scope[_SESSION], None)
    name = card["id"]
    paging = {"has_more": False, "first_id": name, "last_id": name}
    return json_response({"object": "list", "data": [card], **paging})


async def _model(request: Request) -> Response:
    return json_response(_model_card(request.scope[_SESSION], request.path_params["name"]))


def _model_card(session: GatewaySession, name: str | None) -> dict[str, Any]:
    # The session's model answers to every name, so every name is known. Both APIs have this path,
    # so the card has OpenAI's fields and Anthropic's.
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


async def _health(request: Request) -> Response:
    return Response()


# -- sessions over HTTP --------------------------------------------------------------------------


class SessionHandlers:
    """Opens, shows and closes sessions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def open(self, request: Request) -> Response:
        """`POST /sessions`: settings of `Gateway.session`; answers with the URL and the secret."""
        content = await request_body(request)
        body = object_in(content) if content else {}
        session = self._gateway.open_session(body)
        return json_response({**session.summary(), "api_key": session.api_key}, 201)

    async def list(self, request: Request) -> Response:
        """`GET /sessions`: the ids of the open sessions."""
        return json_response({"sessions": sorted(self._gateway.sessions)})

    async def show(self, request: Request) -> Response:
        """`GET /sessions/ID`: the session's summary."""
        return json_response(self._session(request).summary())

    async def drop(self, request: Request) -> Response:
        """`DELETE /sessions/ID`: closes the session and deletes its calls."""
        session = self._session(request)
        await self._gateway.drop_session(session)
        return json_response(session.summary())

    async def close(self, request: Request) -> Response:
        """`POST /sessions/ID/close`: closes it with its `reward` and `metrics`; a run stores it.

        The same request again gets a 404 once it was stored; one that comes earlier waits for that.
        """
        session = self._session(request)
        content = await request_body(request)
        await self._gateway.close_session(session, object_in(content) if content else {})
        return json_response(session.summary())

    def _session(self, request: Request) -> GatewaySession:
        session = self._gateway.sessions.get(request.path_params["session"])
        if session is None:
            raise RequestError("no open session has this id.", status=404)
        return session


# -- failures ------------------------------------------------------------------------------------


def failure_of_gateway(error: Exception) -> Failure:
    """Return the failure that an agent gets for an exception."""
    if isinstance(error, BaseExceptionGroup) and isinstance(error.exceptions[0], Exception):
        return failure_of_gateway(error.exceptions[0])
    found = failure_of_request(error)
    message = redact_text(found.message, ())
    for kind, status, code in _STATUS_OF_MODEL:
        if isinstance(error, kind):
            return Failure(status, code, _without_address(message, code))
    if isinstance(error, ServerError):
        # A wrong key, URL or model name is the gateway's, so the error must not blame the agent.
        if error.kind == "episode":
            return Failure(400, "invalid_request", _ADDRESS.sub("the model's server", message))
        return Failure(502, "upstream_unavailable", _without_address(message, f"{error.status}"))
    if isinstance(error, ModelError):
        if found.status == 500:
            return Failure(502, "upstream_failed", _without_address(message, "upstream_failed"))
        message = _ADDRESS.sub("the model's server", message)
    return Failure(found.status, found.code, message, found.param)


def _without_address(message: str, why: str) -> str:
    """Return a message for an agent, which does not learn where the model's server is."""
    if not _ADDRESS.search(message):
        return message
    return f"the model's server gave no answer ({why}). The gateway's log says more."


def _failed(error: Exception, protocol: WireProtocol | None = None) -> Response:
    failure = failure_of_gateway(error)
    body = openai_error(failure) if protocol is None else protocol.error(failure)
    response = error_response(failure.status, body, closing=(401, 408, 413, 421))
    if failure.status < 500:
        response.headers["x-should-retry"] = "false"
    return response


def _log_failure(request: Request, error: Exception) -> None:
    if failure_of_gateway(error).status >= 500:
        logger.warning("%s failed: %s", request.url.path, error, exc_info=error)


def _answering(handler: Handler, protocol: WireProtocol | None = None) -> Handler:
    def fail(request: Request, error: Exception) -> Response:
        _log_failure(request, error)
        return _failed(error, protocol)

    return answering_errors(handler, fail)
