"""The driver's control server, for the beats of roles and for `rolltree cluster`.

It speaks JSON over HTTP, and every request carries the run's token. It listens on loopback or, with
a launcher for several machines, on the address of this machine.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from rolltree.cluster.roster import Beat, Registration, Roster
from rolltree.errors import ClusterError, ConfigError

_MAX_BODY_BYTES = 16 * 2**20
"""Large, because the progress of a long run has the metrics of all its steps."""

Answer = Mapping[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RoleFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /fail`: why it would be useless to start the role again."""

    name: str
    error: str
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
    """Serves a roster, in the running event loop.

    Args:
        roster: records what roles report.
        token: the token that every request must carry.
        config: the settings of the run, which roles read from `GET /config`.
        host: the address to listen on.
        on_scale, on_fail, on_progress: the driver's handlers of these requests. `on_scale` returns
            the wanted number of roles of each kind.
        describe: returns more fields for `GET /status`.
    """

    def __init__(
        self,
        roster: Roster,
        token: str,
        config: Mapping[str, Any],
        *,
        host: str,
        on_scale: Callable[[Scale], Answer],
        on_fail: Callable[[RoleFailure], None],
        on_progress: Callable[[Progress], None],
        describe: Callable[[], Answer],
    ) -> None:
        self.url = ""
        """The server's URL; empty until it is started."""
        self._roster, self._config, self._host = roster, config, host
        self._token = token
        self._on_scale, self._on_fail, self._on_progress = on_scale, on_fail, on_progress
        self._describe = describe
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port.

        Raises:
            ClusterError: it cannot listen on the address.
        """
        guard = token_guard(self._token)
        app = web.Application(middlewares=[guard], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/register", _taking(Registration, self._roster.register)),
                web.post("/beat", _taking(Beat, self._roster.hear)),
                web.post("/scale", _taking(Scale, self._on_scale)),
                web.post("/fail", _taking(RoleFailure, self._on_fail)),
                web.post("/progress", _taking(Progress, self._on_progress)),
                web.get("/status", self._status),
                web.get("/config", self._settings),
            ]
        )
        try:
            self._runner, self.url = await serve_at(app, self._host)
        except OSError as error:
            raise ClusterError(
                f"the control server cannot listen on {self._host} ({error}), so roles could not "
                "reach it. Check the address of this machine."
            ) from error

    async def aclose(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _status(self, request: web.Request) -> web.Response:
        return _json({**self._describe(), **self._roster.status()})

    async def _settings(self, request: web.Request) -> web.Response:
        return _json(self._config)


def _taking(
    kind: type[Any], handle: Callable[[Any], Answer | None]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of a request whose body is a struct."""

    async def answer(request: web.Request) -> web.Response:
        try:
            given = msgspec.json.decode(await request.read(), type=kind)
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


def token_guard(token: str) -> Any:
    """Return middleware that refuses requests without the token, before their body is read."""
    bearer = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, bearer):
            return refusal(401, "this server accepts only requests with the run's token")
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
    port = runner.addresses[0][1]
    return runner, f"http://{f'[{host}]' if ':' in host else host}:{port}"
