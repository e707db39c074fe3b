"""The driver's control server, for the beats of roles and for `rolltree cluster`.

It speaks JSON over HTTP, and every request carries the run's token. It listens on loopback or, with
a launcher for several machines, on the address of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from rolltree.values.errors import ClusterError, ConfigError
from rolltree.web.guard import NO_RUN_TOKEN, has_token, url_at

_MAX_BODY_BYTES = 16 * 2**20
"""Large, because the progress of a long run has the metrics of all its steps."""
_BODY_S = 60.0

Answer = Mapping[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RoleFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /fail`: why it would be useless to start the role again."""

    name: str
    error: str
    message: str
    pid: int | None = None


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /note`: a role's notice for the user."""

    name: str
    message: str


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /progress`: a callback of `Reporter`, and its arguments by name."""

    call: str
    values: dict[str, Any]


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /scale`; a number that is left out does not change."""

    rollout_workers: int | None = None
    engines: int | None = None


class ControlServer:
    """A server of JSON, in the running event loop.

    Args:
        host: the address to listen on.
        token: the token that every request must carry.
        posts: the struct of the body of each POST, and the function that gets it; it returns the
            answer, or None.
        gets: the function that returns the answer to each GET.
    """

    def __init__(
        self,
        host: str,
        token: str,
        posts: Mapping[str, tuple[type[Any], Callable[[Any], Answer | None]]],
        gets: Mapping[str, Callable[[], Answer]],
    ) -> None:
        self.url = ""
        """The server's URL; empty until it is started."""
        self._host = host
        self._app = web.Application(
            middlewares=[token_guard(token)], client_max_size=_MAX_BODY_BYTES
        )
        self._app.add_routes(web.post(path, _taking(*given)) for path, given in posts.items())
        self._app.add_routes(web.get(path, _giving(give)) for path, give in gets.items())
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port.

        Raises:
            ClusterError: it cannot listen on the address.
        """
        try:
            self._runner, self.url = await serve_at(self._app, self._host)
        except OSError as error:
            raise ClusterError(
                f"the control server cannot listen on {self._host} ({error}), so roles could not "
                "reach it. Check the address of this machine."
            ) from error

    async def aclose(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()


def _giving(give: Callable[[], Answer]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of a request without a body."""

    async def answer(request: web.Request) -> web.Response:
        return _json(give())

    return answer


def _taking(
    kind: type[Any], handle: Callable[[Any], Answer | None]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of a request whose body is a struct."""

    async def answer(request: web.Request) -> web.Response:
        try:
            async with in_time(request):
                body = await request.read()
            given = msgspec.json.decode(body, type=kind)
            return _json(handle(given) or {"ok": True})
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
            return refusal(400, f"{error}")
        except ClusterError as error:
            return refusal(409, f"{error}")

    return answer


def _json(value: Answer, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def refusal(status: int, message: str) -> web.Response:
    """Return an error response with a message."""
    return _json({"error": message}, status)


@asynccontextmanager
async def in_time(request: web.Request) -> AsyncIterator[None]:
    """Refuse a request whose body does not arrive within a minute."""
    try:
        async with asyncio.timeout(_BODY_S):
            yield
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body of {request.path} did not arrive within {_BODY_S:g} s"
        ) from None


def token_guard(token: str) -> Any:
    """Return middleware that refuses requests without the token, before their body is read."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not has_token(request.raw_headers, token):
            return refusal(401, NO_RUN_TOKEN)
        return await handler(request)

    return guard


async def serve_at(app: web.Application, host: str) -> tuple[web.AppRunner, str]:
    """Serve on a free port; return the runner, to be cleaned up at the end, and the URL.

    Raises:
        OSError: the host is not an address of this machine.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, url_at(host, runner.addresses[0][1])
