"""The gateway's ASGI application: access to sessions, and their management over HTTP.

/s/ID/v1/...               a session's agent, with the session's secret
/s/ID/agents/NAME/v1/...   the same for one of several agents of the session
/sessions, /sessions/ID    opens, shows and closes sessions, with the admin key
/health
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from rolltree._helpers.redact import redact_text
from rolltree.gateway.failures import Failure, failure_of_request
from rolltree.gateway.session import GatewaySession
from rolltree.gateway.wire import (
    PROTOCOLS,
    SESSION,
    Paths,
    WireApp,
    answering,
    asking,
    beside,
    model_card,
    models_response,
)
from rolltree.values.errors import (
    CallTimeout,
    ConnectionFailed,
    ModelError,
    ServerError,
    StoreError,
)
from rolltree.web.answers import Handler, json_response
from rolltree.web.guard import RequestError, digest_of, foreign_request, has_digest, key_in
from rolltree.web.limits import object_in, request_body

if TYPE_CHECKING:
    from rolltree.gateway.server import Gateway

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


class GatewayApp(WireApp):
    """The ASGI application; `hosts` are the `Host` headers that are answered.

    Requests are refused before their body is read: a foreign `Host` with 421, an `Origin` with 403.
    An unknown session and a wrong secret give the same 401, which does not reveal what sessions
    exist.
    """

    def __init__(self, gateway: Gateway, hosts: Collection[str]) -> None:
        super().__init__(gateway.read_timeout_s, gateway.write_timeout_s)
        self._gateway, self._hosts = gateway, frozenset(hosts)
        self._admin_key = digest_of(gateway.admin_key)
        admin = SessionHandlers(gateway)
        self._agents = Paths(_agent_routes())
        self._others = Paths(
            [
                ("GET", "/health", _health),
                ("POST", "/sessions", answering(admin.open)),
                ("GET", "/sessions", answering(admin.list)),
                ("GET", "/sessions/{session}", answering(admin.show)),
                ("DELETE", "/sessions/{session}", answering(admin.drop)),
                ("POST", "/sessions/{session}/close", answering(admin.close)),
            ]
        )

    def failure(self, error: Exception) -> Failure:
        """Return the failure that an agent gets for an exception."""
        return failure_of_gateway(error)

    def admitted(self, scope: Scope) -> Handler:
        """Return the handler of a request, or raise `RequestError`."""
        headers, path = scope["headers"], scope["path"]
        # A Unix socket has no host name, so DNS rebinding cannot reach it.
        # Older releases of uvicorn leave out its address.
        if (scope.get("server") or (None, None))[1] is not None:
            refusal = foreign_request(headers, self._hosts)
            if refusal is not None:
                raise refusal
        of_agent, paths = _AGENT_PATH.fullmatch(path), self._others
        if of_agent is not None:
            session = self._gateway.sessions.get(of_agent[1] or of_agent[4])
            if session is None or not session.has_key(key_in(headers)):
                raise RequestError(
                    "no open session has this address and this key. Send the session's own key, as "
                    "a bearer token or as x-api-key.",
                    status=401,
                )
            scope[SESSION] = session
            paths, path = self._agents, of_agent[3] or path
        elif path != "/health" and not has_digest(key_in(headers), self._admin_key):
            raise RequestError(
                "the request has no valid admin key. Send the one that the gateway was started "
                "with as a bearer token.",
                status=401,
            )
        handler, named = paths.find(scope["method"], path)
        if of_agent is not None and of_agent[2]:
            named["agent"] = of_agent[2]
        scope["path_params"] = named
        return handler


def _agent_routes() -> Iterable[tuple[str, str, Handler]]:
    yield "GET", "/models", answering(_models)
    yield "GET", "/models/{name:path}", answering(_model)
    for protocol in PROTOCOLS:
        yield "POST", protocol.path, asking(protocol)
        for (method, path), side in protocol.sides.items():
            yield method, path, beside(protocol, side)


async def _models(request: Request) -> Response:
    return models_response(model_card(request.scope[SESSION]))


async def _model(request: Request) -> Response:
    # The session's model answers to every name, so every name is known.
    return json_response(model_card(request.scope[SESSION], request.path_params["name"]))


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
