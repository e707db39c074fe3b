"""The application: access control (host, origin, token), response headers, static files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolltree._helpers.untrusted import shorten
from rolltree.insight.page.api import Api, api_response
from rolltree.insight.page.bundle import STATIC
from rolltree.web.guard import RequestError, foreign_request, has_token, header

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# This page shows text of models. Even if some of it became markup, it could not run a script, load
# anything, or send anything away.
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer. Only the page's own files are scripts and styles; text never is."""


def create_viewer_app(
    root: Path, token: str, hosts: Collection[str], *, redirect: Path | None = None
) -> Starlette:
    """Return the ASGI application for the runs at and below `root`.

    Args:
        root: a run directory, or a folder with runs below it.
        token: the bearer token that requests for data must have.
        hosts: the `Host` headers that are answered, such as `127.0.0.1:8321`.
        redirect: a file that leads a browser to the page, removed once it has and when the server
            stops.
    """
    api = Api(root)

    def remove_redirect() -> None:
        if redirect is not None:
            redirect.unlink(missing_ok=True)

    async def check_token(request: Request) -> Response:
        # The guard has compared the token.
        if request.query_params.get("from") == "file":
            remove_redirect()
        return api_response({})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        # Here, because the signal that stops the server then ends the process.
        remove_redirect()

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/static/{name}", _static),
            Route("/api/token", check_token),
            Route("/api/{rest:path}", api.answer),
        ],
        middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _page(request: Request) -> Response:
    """Answer with the page, with links that preload every module."""
    # Without them, modules that import each other would be loaded one round trip after another
    # (design/0025).
    script = '<script type="module"'
    before, found, after = (STATIC / "index.html").read_text(encoding="utf-8").partition(script)
    names = sorted(path.name for path in STATIC.glob("*.js"))
    links = [f'<link rel="modulepreload" href="static/{name}">\n    ' for name in names]
    return Response(before + "".join(links) + found + after, media_type=_TYPES[".html"])


async def _static(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    # Compared with the existing names, so that no name leads out of the folder.
    path = next((each for each in STATIC.iterdir() if each.name == name), None)
    if path is None or path.suffix not in _TYPES or not path.is_file():
        raise HTTPException(404, "there is no such file.")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix])


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return api_response(
        {"error": f"{shorten(request.url.path, 200)} cannot be answered: {detail}"}, status
    )


class Guard:
    """Refuses requests that do not come from the page, before reading their bodies.

    A foreign `Host` gets status 421 (a name that was rebound to this machine), a foreign `Origin`
    403, a request for data without the token 401, and a method other than GET and HEAD 405.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app, self._token = app, token
        self._hosts = frozenset(hosts)
        self._origins = frozenset(f"http://{host}" for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        app = self._app
        if refusal is not None:
            app = api_response({"error": str(refusal)}, refusal.status)
        await app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        foreign = foreign_request(headers, self._hosts, self._origins)
        if foreign is not None:
            return foreign
        if scope["method"] not in ("GET", "HEAD"):
            return RequestError("this server only reads: use GET.", status=405)
        # The page's own files are public, but the data is not.
        if not scope["path"].startswith("/api/"):
            return None
        if header(headers, b"sec-fetch-site") not in (None, "same-origin", "none"):
            return RequestError("the request comes from another page.", status=403)
        if not has_token(headers, self._token):
            why = "the token is missing or old. Open the link that `rolltree view` printed."
            return RequestError(why, status=401)
        return None
