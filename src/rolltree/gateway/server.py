"""`Gateway`: the sessions of agent programs, and the HTTP server through which they are reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltree._helpers.tasks import ShortCollections, allow_open_files
from rolltree.gateway.app import GatewayApp
from rolltree.gateway.journal import Journal, KeptSession
from rolltree.gateway.serve.app import ServerOptions
from rolltree.gateway.session import NO_LIMITS, GatewaySession, SessionLimits
from rolltree.gateway.wire import WRITE_TIMEOUT_S
from rolltree.inference.client import as_client, check_sampling_names
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.values.errors import ConfigError, StoreError, refuse_unknown
from rolltree.values.seeds import derive_seed
from rolltree.values.types import RolloutRequest, RolloutResult, SamplingArgs, SamplingParams, State
from rolltree.web.guard import RequestError, url_at
from rolltree.web.limits import READ_TIMEOUT_S
from rolltree.web.start import AnnouncingServer, listen, server_config

PATIENCE_LIMIT_S = 2.0
"""How long the gateway's own client tries a server that cannot be reached, before its agent hears
of it."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class SessionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sessions`."""

    id: str | None = None
    sampling: dict[str, Any] = {}
    seed: int | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    time_limit_s: float | None = None
    drop_fields: list[str] = []
    info: dict[str, Any] = {}


class SessionOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sessions/ID/close`."""

    reward: float | None = None
    metrics: dict[str, float | None] = {}


class Gateway:
    """Sessions of agent programs in front of one model client.

        async with rt.gateway(client) as g:
            async with g.session() as s:
                run_agent(base_url=s.base_url, api_key=s.api_key)
            s.state["trajectory"].tree

    Args:
        client: a `ModelClient`, or what `as_client` accepts. The caller closes it.
        directory: the folder for finished calls of open sessions; a gateway that is started on it
            again serves the same sessions. Without it (and without a run) they are in memory only.
        run: the run that stores sessions that are closed over HTTP; `directory` defaults to
            `gateway/` in its folder.
        host, port: where to listen; port 0 takes a free one.
        allow_remote: allow an address that is not loopback.
        admin_key: the key for requests that open and close sessions; None generates one.
        unix_socket: a path to listen on as well, for programs without network access.
        allowed_hosts: further names under which the gateway is reached, such as
            `host.containers.internal:8000`.
        limits: the limits of sessions that set none.
        read_timeout_s, write_timeout_s: how long a request may take to arrive, and how long a
            client may take to read a part of its answer.
        max_sessions: the most sessions that may be open at a time.

    Raises:
        ConfigError: `admin_key` is empty, or the address is not loopback and `allow_remote` or
            `admin_key` is missing.
    """

    def __init__(
        self,
        client: object,
        *,
        directory: str | Path | None = None,
        run: Run | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        admin_key: str | None = None,
        unix_socket: str | Path | None = None,
        allowed_hosts: Sequence[str] = (),
        limits: SessionLimits = NO_LIMITS,
        read_timeout_s: float = READ_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        max_sessions: int = 10_000,
        **unknown: Any,
    ) -> None:
        refuse_unknown("gateway", unknown, Gateway)
        self._where = ServerOptions(host, port, admin_key, allow_remote)
        self.client = as_client(client)
        self.admin_key = admin_key or secrets.token_urlsafe(24)
        self.sessions: dict[str, GatewaySession] = {}
        """The open sessions, by id."""
        self.limits, self.max_sessions = limits, max_sessions
        self.read_timeout_s, self.write_timeout_s = read_timeout_s, write_timeout_s
        self.url = ""
        """The gateway's URL, without a path; empty until it is started."""
        self._run, self._allowed_hosts = run, tuple(allowed_hosts)
        if directory is None and run is not None:
            directory = run.path / "gateway"
        self._folder = None if directory is None else Path(directory)
        self._journal: Journal | None = None
        self._socket = None if unix_socket is None else Path(unix_socket)
        self.listener: socket.socket | None = None
        """The TCP socket on which it listens, once it is started."""
        # What `aclose` has to close, even if `start` failed half-way.
        self._opened = contextlib.ExitStack()
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._collections: ShortCollections | None = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen, and restore the sessions that an earlier gateway left open.

        Raises:
            ConfigError: it cannot listen on the address.
            StoreError: the directory cannot be used.
        """
        try:
            await self._start()
        except BaseException:  # a cancellation, too; `async with` does not call `aclose` then
            await self.aclose()
            raise

    async def _start(self) -> None:
        allow_open_files()
        listener = self.listener = listen(self._where.host, self._where.port)
        port = listener.getsockname()[1]
        self.url = url_at(self._where.host, port)
        self._opened.callback(listener.close)
        listeners = [listener]
        if self._socket is not None:
            listeners.append(_unix_listener(self._socket))
            self._opened.callback(listeners[1].close)
            self._opened.callback(self._socket.unlink, missing_ok=True)
        if self._folder is not None:
            self._journal = Journal(self._folder)
            self._opened.callback(self._journal.close)
            for session_id, kept in self._journal.read():
                self._restore(session_id, kept)
        own = self.url.removeprefix("http://")
        hosts = {own, f"127.0.0.1:{port}", f"localhost:{port}", *self._allowed_hosts}
        app = GatewayApp(self, hosts)
        config = server_config(app, self.read_timeout_s, lifespan="off", date_header=False)
        ready = asyncio.Event()
        self._server = _QuietServer(config, ready.set)
        self._serving = asyncio.ensure_future(self._serve(self._server, listeners))
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait((waiting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            self._serving.result()

    async def _serve(self, server: _QuietServer, listeners: list[socket.socket]) -> None:
        try:
            await server.serve(listeners)
        finally:
            # An event loop that ends without `aclose` cancels this; it must free the port, too.
            for each in (*getattr(server, "servers", ()), *listeners):
                each.close()

    @property
    def is_serving(self) -> bool:
        """Whether it listens."""
        return self._serving is not None and not self._serving.done()

    async def aclose(self) -> None:
        """Stop listening and cancel calls in flight. Open sessions stay only in the `directory`."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,))
        for session in list(self.sessions.values()):
            await session.aclose()
            self._remove(session)
        self._opened.close()

    def session(
        self,
        session_id: str | None = None,
        *,
        client: object = None,
        state: State | None = None,
        sampling: SamplingArgs | SamplingParams | None = None,
        seed: int | None = None,
        limits: SessionLimits | None = None,
        drop_fields: Sequence[str] = (),
        info: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> GatewaySession:
        """Open a session; `async with` closes it. The arguments are `GatewaySession`'s.

        `client` replaces the gateway's client, for example with an episode's.

        Raises:
            ConfigError: the id is taken or invalid, a setting cannot be used, or too many sessions
                are open.
            StoreError: the directory cannot be written.
        """
        refuse_unknown("session", unknown, Gateway.session)
        if session_id is None:
            session_id = secrets.token_hex(8)
        if not _ID.fullmatch(session_id) or session_id in self.sessions:
            raise ConfigError(
                f"a session cannot be called {session_id!r}: it is taken, is not 1 to 64 letters, "
                "digits, - and _, or begins with - or _. Leave the id out to get one."
            )
        if len(self.sessions) >= self.max_sessions:
            raise ConfigError(
                f"{len(self.sessions)} sessions are open, and max_sessions is {self.max_sessions}. "
                "Close some first."
            )
        made = self._make(
            session_id,
            client=self.client if client is None else as_client(client),
            # An agent elsewhere retries by itself; a rollout would be lost.
            patience_s=PATIENCE_LIMIT_S if client is None else None,
            state=state,
            sampling=sampling,
            seed=seed,
            limits=self.limits if limits is None else limits,
            drop_fields=drop_fields,
            info=info,
            api_key=secrets.token_urlsafe(24),
        )
        try:
            if made.journal is not None:
                made.journal.publish()
        except StoreError:
            self._closed(made)
            raise
        return made

    def _make(self, session_id: str, **settings: Any) -> GatewaySession:
        made = GatewaySession(session_id, base_url=self.url, on_close=self._closed, **settings)
        if self._journal is not None:
            made.journal = self._journal.create(session_id, made.settings())
        self.sessions[session_id] = made
        if self._collections is None and len(self.sessions) >= ShortCollections.FEW:
            # Full garbage collections scan all that sessions keep: an eighth of a call's time.
            self._collections = ShortCollections(len(self.sessions)).__enter__()
        return made

    def _restore(self, session_id: str, kept: KeptSession) -> None:
        settings = dict(kept.settings)
        made = self._make(
            session_id,
            client=self.client,
            patience_s=PATIENCE_LIMIT_S,
            key_digest=settings.pop("key_digest"),
            limits=SessionLimits(**settings.pop("limits")),
            **settings,
        )
        made.restore(kept)

    def _closed(self, session: GatewaySession) -> None:
        if self._collections is not None:
            self._collections.ended(1)
        # A request that closes it keeps its id taken until it is stored.
        if not session.ending.locked():
            self._remove(session)

    def _remove(self, session: GatewaySession) -> None:
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]
        if self._collections is not None and not self.sessions:
            self._collections.__exit__()
            self._collections = None

    # -- over HTTP -------------------------------------------------------------------------------

    def open_session(self, body: Mapping[str, Any]) -> GatewaySession:
        """Open a session with the settings of a request.

        Raises:
            RequestError: a setting is unknown or has a wrong type, or the run has the id.
            ConfigError, StoreError: as in `session`.
        """
        given = _converted(body, SessionSettings)
        check_sampling_names(given.sampling)
        if self._run is not None and self._run.num_rollouts(request_id=given.id or ""):
            raise RequestError(
                f"the run already stores a closed session {given.id!r}, and keeps only one per id, "
                "so this one would be lost. Choose another id, or leave it out.",
                param="id",
            )
        limits = SessionLimits(
            *(
                getattr(self.limits, name) if getattr(given, name) is None else getattr(given, name)
                for name in ("max_calls", "max_tokens", "time_limit_s")
            )
        )
        return self.session(
            given.id,
            sampling=given.sampling,
            seed=given.seed,
            limits=limits,
            drop_fields=given.drop_fields,
            info=given.info,
        )

    async def close_session(self, session: GatewaySession, body: Mapping[str, Any]) -> None:
        """Close a session with the outcome of a request, and store it if there is a run.

        Raises:
            RequestError: a field is unknown, or an earlier request ended the session.
            StoreError: it cannot be stored; its calls stay on disk, and it can be closed again.
        """
        outcome = _converted(body, SessionOutcome)
        async with session.ending:
            await self._end(session)
            session.state.reward, session.state.metrics = outcome.reward, dict(outcome.metrics)
            if self._run is not None:
                run, result = self._run, _result_of(session)
                await asyncio.to_thread(lambda: run.add_rollouts(encode_result(result)))
            self.forget(session)

    async def drop_session(self, session: GatewaySession) -> None:
        """Close a session and delete its calls.

        Raises:
            RequestError: an earlier request ended the session.
        """
        async with session.ending:
            await self._end(session)
            self.forget(session)

    async def _end(self, session: GatewaySession) -> None:
        if self.sessions.get(session.id) is not session:
            raise RequestError("another request has closed the session meanwhile.", status=404)
        await session.aclose()

    def forget(self, session: GatewaySession) -> None:
        """Delete what is kept of a closed session."""
        self._remove(session)
        session.release()


def _result_of(session: GatewaySession) -> RolloutResult:
    seed = session.seed or 0
    request = RolloutRequest(
        request_id=session.id,
        env_id="gateway",
        input=session.state["input"],
        seed=seed,
        sampling_seed=derive_seed(seed, "sampling"),
        group_id=str(session.info.get("group_id", session.id)),
        index_in_group=0,
        phase=str(session.info.get("phase", "gateway")),
    )
    return RolloutResult(request, (session.state,), session.state.error)


def _converted(body: Mapping[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{error}.") from error


def _unix_listener(path: Path) -> socket.socket:
    # A killed gateway leaves its socket; any other file is somebody's data.
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(
            f"the gateway cannot listen on the socket {path}: a file that is not a socket is "
            "there, and would be deleted. Move it away, or choose another path."
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the gateway cannot listen on the socket {path} ({error}).") from error
    return listener


class _QuietServer(AnnouncingServer):
    """A server in the caller's event loop, which leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
