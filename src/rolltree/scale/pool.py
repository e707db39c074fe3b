"""Several servers of one model as one `ModelClient`.

A rollout stays on one server, whose prefix cache knows its earlier turns. Rollouts that begin with
the same prompt (a group) go to the same server, unless it is far busier than the others:
rendezvous hashing with bounded loads (Thaler and Ravishankar 1998; Mirrokni et al. 2018). A server
that fails gets no calls for a while, and its health is checked before it is used again; its
rollouts move to other servers and keep their memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rolltree._helpers.untrusted import encode_json
from rolltree.inference.call import DeltaListener, ModelCall
from rolltree.inference.client import ModelClient, policy_version
from rolltree.inference.client_base import RootClient
from rolltree.inference.openai_client import OpenAIClient
from rolltree.inference.retry import ONCE, Retry, RetryPolicy, with_retries
from rolltree.inference.session import without_ids
from rolltree.values.errors import (
    BadResponse,
    CallTimeout,
    ConfigError,
    ConnectionFailed,
    ModelError,
    ServerError,
    TokenError,
)
from rolltree.values.types import ModelResponse

if TYPE_CHECKING:
    from rolltree.scale.fleet import Fleet

_ALWAYS_FITS = 16
"""A server with fewer calls in flight than this is never too busy for its own rollouts."""


@runtime_checkable
class _Checked(Protocol):
    async def check_health(self) -> None: ...


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server: its client (a `ModelClient`), its load and its failures."""

    client: Any
    name: str
    num_in_flight: int = 0
    num_calls: int = 0
    num_failures: int = 0  # in a row
    down_until_s: float = 0.0  # time.monotonic(); 0 while it is up
    is_removed: bool = False

    @property
    def is_up(self) -> bool:
        """Whether its last call or health check succeeded, and it is still in the pool."""
        return self.num_failures == 0 and not self.is_removed


@dataclass(slots=True)
class PoolPlace:
    """Where one rollout is: its server, its session there, and what its first prompt hashes."""

    key: bytes | None = None
    at: Endpoint | None = None
    session: Any = None


class EndpointPool(RootClient[PoolPlace]):
    """Servers of one model. Every retry is made here, on the next best server, and counted.

    Args:
        clients: one per server; give them no retries of their own (`EndpointPool.of` does).
        retry: how often, and with which waits, a call is retried over all servers.
        deadline_s: a call that has failed for this long, over all servers, is not retried; the
            longest `deadline_s` of the clients unless given.
        cool_down_s: how long a server gets no calls after a failure; doubles up to a minute.
        spread: a server may have this many times the mean number of calls in flight.

    Raises:
        ConfigError: there are no clients, two have the same name, or their models differ.
    """

    fleet: Fleet | None = None
    """Of a run: decides when a server gets a call, and which answers count."""

    def __init__(
        self,
        clients: Sequence[ModelClient],
        *,
        retry: RetryPolicy | None = None,
        deadline_s: float | None = None,
        cool_down_s: float = 2.0,
        spread: float = 1.25,
    ) -> None:
        names = [_name(client, index) for index, client in enumerate(clients)]
        if not clients or len(set(names)) < len(names):
            raise ConfigError(
                f"a pool needs at least one server, and no server twice; got {names}."
            )
        if len({client.model for client in clients}) > 1:
            raise ConfigError(
                "the servers of a pool have different models, so requests would get answers from "
                "different models. Use one pool per model."
            )
        if cool_down_s < 0 or spread < 1 or (deadline_s is not None and deadline_s <= 0):
            raise ConfigError(
                "cool_down_s must be >= 0, spread >= 1 and deadline_s > 0; they are "
                f"{cool_down_s}, {spread} and {deadline_s}."
            )
        self.endpoints = [Endpoint(*pair) for pair in zip(clients, names, strict=True)]
        self._given_retry = retry
        if deadline_s is None:
            servers = [getattr(client, "server", None) for client in clients]
            deadline_s = max((server.deadline_s for server in servers if server), default=None)
        self.deadline_s = deadline_s
        self._cool_down_s, self._spread = cool_down_s, spread

    @classmethod
    def of(
        cls,
        base_urls: Sequence[str],
        model: str,
        *,
        retry: RetryPolicy | None = None,
        deadline_s: float | None = None,
        cool_down_s: float = 2.0,
        spread: float = 1.25,
        **options: Any,
    ) -> EndpointPool:
        """Return a pool of `OpenAIClient`s; `options` are theirs."""
        clients = [OpenAIClient(url, model, retry=ONCE, **options) for url in base_urls]
        return cls(
            clients, retry=retry, deadline_s=deadline_s, cool_down_s=cool_down_s, spread=spread
        )

    def __repr__(self) -> str:
        return f"EndpointPool({[endpoint.name for endpoint in self.endpoints]})"

    @property
    def model(self) -> str:
        """The model of calls that name none."""
        model: str = self.endpoints[0].client.model
        return model

    @property
    def version(self) -> int:
        """The oldest version of the servers' weights."""
        # No sampled token may look newer than it is.
        return min(policy_version(endpoint.client) for endpoint in self.endpoints)

    @property
    def clients(self) -> list[Any]:
        """The clients, one per server, as `publish_weights` takes them."""
        return [endpoint.client for endpoint in self.endpoints]

    def new_memory(self) -> PoolPlace:
        """Return the place of a new rollout; its first prompt decides on the server."""
        return PoolPlace()

    async def aclose(self) -> None:
        """Close all clients."""
        await asyncio.gather(*(endpoint.client.aclose() for endpoint in self.endpoints))

    async def check(self) -> dict[str, str | None]:
        """Check every server; return None for a healthy one, else its error message."""
        errors = await asyncio.gather(*map(self._check, self.endpoints))
        return {
            endpoint.name: None if error is None else str(error)
            for endpoint, error in zip(self.endpoints, errors, strict=True)
        }

    async def choose(self, key: bytes, stay: Endpoint | None = None) -> Endpoint:
        """Return the server for prompts that begin with `key`: `stay` while it is up.

        Servers whose cool-down is over get a health check first. If no server is healthy, the one
        whose cool-down ends first is tried anyway.
        """
        # The server's cache has the earlier turns.
        if stay is not None and stay.is_up:
            return stay
        # Each key has its own order of servers. If one goes away, only its keys move.
        ranked = sorted(self.endpoints, key=lambda endpoint: _rank(key, endpoint.name))
        up: list[Endpoint] = []
        for endpoint in ranked:
            is_due = not endpoint.is_up and monotonic() >= endpoint.down_until_s
            if endpoint.is_up or (is_due and await self._check(endpoint) is None):
                up.append(endpoint)
        if not up:
            return min(ranked, key=lambda endpoint: endpoint.down_until_s)
        # Plus one for the call that is being placed.
        mean = (sum(endpoint.num_in_flight for endpoint in up) + 1) / len(up)
        limit = max(ceil(self._spread * mean), _ALWAYS_FITS)
        return next((each for each in up if each.num_in_flight < limit), up[0])

    @property
    def retry(self) -> RetryPolicy:
        """How often a call is retried."""
        # The default of one server, plus one retry for each.
        return self._given_retry or RetryPolicy(max_retries=6 + len(self.endpoints))

    def add(self, client: ModelClient) -> None:
        """Add a server, which gets calls from now on.

        Raises:
            ConfigError: the server is already in the pool, or has a different model.
        """
        name = _name(client, len(self.endpoints))
        if client.model != self.model or name in {each.name for each in self.endpoints}:
            raise ConfigError(
                f"{name} cannot be added to {self!r}: a pool needs different servers of one "
                f"model ({self.model!r})."
            )
        self.endpoints.append(Endpoint(client, name))

    def remove(self, client: ModelClient) -> None:
        """Send no more calls to a server; its rollouts move on. The client stays open.

        Raises:
            ConfigError: it is the last server.
        """
        kept = [each for each in self.endpoints if each.client is not client]
        if not kept:
            raise ConfigError(f"{self!r} would be left without a server. Add another one first.")
        for endpoint in self.endpoints:
            endpoint.is_removed = endpoint.is_removed or endpoint.client is client
        self.endpoints = kept

    async def respond(self, call: ModelCall, memory: PoolPlace) -> ModelResponse:
        """Make the call on this rollout's server, or on the next best one."""
        key, failed = _key(call, memory), list[str]()
        began = monotonic()
        listener = None if call.on_delta is None else DeltaListener(call.on_delta)
        if listener is not None:
            call = replace(call, on_delta=listener)
        wrong = set[str]()  # servers whose tokens contradict themselves

        async def attempt() -> tuple[ModelResponse, Endpoint]:
            endpoint = await self.choose(key, memory.at)
            session = _session_on(endpoint, memory)
            endpoint.num_in_flight += 1
            endpoint.num_calls += 1
            ask = partial(call.to, session)
            try:
                fleet, client = self.fleet, endpoint.client
                answer = await (ask() if fleet is None else fleet.counted(client, ask))
            except (ConnectionFailed, BadResponse, ServerError, TokenError) as error:
                # The request itself is wrong, for every server.
                if isinstance(error, ServerError) and not error.retryable:
                    raise
                # One server, or a proxy in front of it, may mix up answers. If all servers fail
                # like this, the cause is the request.
                if isinstance(error, TokenError):
                    wrong.add(endpoint.name)
                    if wrong >= {each.name for each in self.endpoints}:
                        raise  # it is not one server's fault
                failed.append(endpoint.name)
                self.note_failure(endpoint)
                # After each failure, since an attempt has its own limit.
                limit_s = self.deadline_s
                if limit_s is not None and monotonic() - began >= limit_s:
                    raise CallTimeout(
                        f"{self!r} gave no answer within deadline_s = {limit_s:g} s, in "
                        f"which it was asked {len(failed)} times. The call is lost. Are the "
                        f"servers overloaded or stuck? The last error: {error}"
                    ) from error
                raise Retry(error) from error
            finally:
                endpoint.num_in_flight -= 1
            endpoint.num_failures = 0
            return answer, endpoint

        outcome = await with_retries(
            self.retry,
            attempt,
            may_retry=lambda: listener is None or not listener.has_begun,
        )
        answer, endpoint = outcome.value
        info: dict[str, Any] = {"endpoint": endpoint.name}
        if failed:
            info["num_retries"] = answer.info.get("num_retries", 0) + len(failed)
            info["failed_endpoints"] = failed
        return answer.annotated(wait_s=outcome.wait_s, **info)

    def recall(self, call: ModelCall, response: ModelResponse, memory: PoolPlace) -> ModelResponse:
        """Add a call that was made elsewhere to a rollout's session; see `Session.remember`."""
        if memory.at is None:
            key = _key(call, memory)
            best = min(self.endpoints, key=lambda endpoint: _rank(key, endpoint.name))
            _session_on(best, memory)
        known = getattr(memory.session, "remember", None)
        return without_ids(response) if known is None else known(call, response)

    def note_failure(self, endpoint: Endpoint) -> None:
        """Send a server no calls for a while.

        The calls that were in flight when it failed do not prolong the pause.
        """
        if endpoint.num_failures and monotonic() < endpoint.down_until_s:
            return
        pause_s = min(self._cool_down_s * 2.0**endpoint.num_failures, 60.0)
        endpoint.num_failures += 1
        endpoint.down_until_s = monotonic() + pause_s

    async def _check(self, endpoint: Endpoint) -> ModelError | None:
        try:
            if isinstance(endpoint.client, _Checked):
                await endpoint.client.check_health()
            if self.fleet is not None:
                self.fleet.check(endpoint.client)
        except ModelError as error:
            self.note_failure(endpoint)
            return error
        endpoint.num_failures = 0
        return None


def _name(client: ModelClient, index: int) -> str:
    server = getattr(client, "server", None)
    return str(server.base_url) if server is not None else f"{type(client).__name__}-{index}"


def _rank(key: bytes, name: str) -> bytes:
    # Not `hash`, which differs from process to process.
    return hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest()


def _key(call: ModelCall, place: PoolPlace) -> bytes:
    """Return the key that decides on the server: the rollout's first prompt of messages."""
    if place.key is None:
        if isinstance(call.prompt, np.ndarray):
            # Not stored: the rollout's key comes from its first prompt of messages.
            return call.prompt.tobytes()
        place.key = encode_json([call.model, call.prompt, call.tools])
    return place.key


def _session_on(endpoint: Endpoint, place: PoolPlace) -> Any:
    """Return a rollout's session on a server, with its memory if that can move."""
    if place.at is not endpoint:
        move = getattr(place.session, "moved_to", None)
        place.session = move(endpoint.client) if move else endpoint.client.session()
        place.at = endpoint
    return place.session
