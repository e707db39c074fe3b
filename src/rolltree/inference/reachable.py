"""Checks servers before an evaluation: whether they answer, and which weights they serve.

After a training run has ended or was killed, its servers go on serving the weights it published,
under the same model name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from rolltree.inference.client import with_inner
from rolltree.inference.http import HttpClient
from rolltree.inference.retry import ONCE, WHILE_AWAY, RetryPolicy
from rolltree.inference.wire import UNREADABLE
from rolltree.values.errors import BadResponse, ConnectionFailed, ModelError, ServerError

_REQUEST_TIMEOUT_S = 5.0
FIRST_ANSWER_TIMEOUT_S = 5.0
"""How long to wait for the first answer of any server."""


async def check_servers(client: object, *, limit_s: float = FIRST_ANSWER_TIMEOUT_S) -> list[str]:
    """Check a client's servers, and return warnings about the weights they serve.

    If a server does not report a version per token, its tokens get the version found here.

    Raises:
        ConnectionFailed: none of them answered within `limit_s`.
    """
    parts = list(with_inner(client))
    # A training run checks its own servers.
    if any(getattr(part, "fleet", None) is not None for part in parts):
        return []
    parts = [part for part in parts if isinstance(getattr(part, "server", None), HttpClient)]
    if not parts:
        return []
    await _wait_for_one(parts, limit_s)
    return [found for found in await asyncio.gather(*map(_weights_warning, parts)) if found]


async def _wait_for_one(parts: list[Any], limit_s: float) -> None:
    """Wait until one of the servers answers."""
    began = monotonic()
    number = 0
    while True:
        # One is enough: the pool uses the others when they are back.
        errors = await asyncio.gather(*(_connection_error(part.server, limit_s) for part in parts))
        if None in errors:
            return
        wait_s = WHILE_AWAY.wait_s(number, None)
        if monotonic() - began + wait_s > limit_s:
            break
        await asyncio.sleep(wait_s)
        number += 1
    raise ConnectionFailed(
        f"no server has answered for {monotonic() - began:.0f} s, so nothing was sampled: "
        f"{' '.join(map(str, errors))} Start the server, or check the URL and its port."
    ) from errors[0]


async def _connection_error(server: HttpClient, limit_s: float) -> ModelError | None:
    try:
        await server.check_reachable(limit_s)
    except ConnectionFailed as error:
        return error
    return None


async def _weights_warning(part: Any) -> str | None:
    """Return a warning if a server's weights are unusual; None also if it does not report them."""
    server: HttpClient = part.server
    try:
        label = await served_version(server, timeout_s=_REQUEST_TIMEOUT_S, retry=ONCE)
        paused = await call(server, "/is_paused", None, timeout_s=_REQUEST_TIMEOUT_S, retry=ONCE)
    except ModelError:
        return None
    if isinstance(paused, dict) and paused.get("is_paused") is True:
        return (
            f"{server.root_url} is paused, probably by a trainer that died while publishing: calls "
            "wait until the server is resumed (POST /resume) or restarted."
        )
    if label in ("default", str(part.version)):  # version 0 is what a run began with
        return None
    # A version is an int32.
    if label.isdecimal() and len(label) < 10:
        part.version = int(label)
    return (
        f"{server.root_url} serves version {label[:40]!r} of its weights, which a training run "
        f"published: these are measured, not the weights that {part.model!r} was started with. "
        "Restart the server to measure those."
    )


async def served_version(
    server: HttpClient, *, timeout_s: float | None = None, retry: RetryPolicy | None = None
) -> str:
    """Return the version that a server reports for its weights (initially "default").

    Raises:
        ModelError: it does not report one.
    """
    answer = await call(server, "/weight_info", None, timeout_s=timeout_s, retry=retry)
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise BadResponse(
            f"{server.root_url}/weight_info answered {answer!r}, without a weight_version."
        )
    return version


async def call(
    server: HttpClient,
    path: str,
    body: dict[str, Any] | None,
    decode: Callable[[bytes], Any] | None = None,
    *,
    retry: RetryPolicy | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Send a request with the admin token and return the answer, from JSON if `decode` is None.

    Raises:
        ModelError: as `HttpClient.post` does.
    """
    try:
        outcome = await server.post(
            path,
            body,
            decode or _decode,
            at_root=True,
            as_admin=True,
            retry=retry,
            timeout_s=timeout_s,
        )
        return outcome.value
    except ServerError as error:
        # The 404 of `rolltree serve` already says what the server was started without.
        if error.status != 404 or "rolltree serve" in str(error):
            raise
        raise ServerError(
            f"{server.root_url} has no {path.partition('?')[0]} (404), so it cannot be given "
            "weights. Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and the flags of "
            "docs/inference.md, vLLM, or use `rolltree serve`. Other servers cannot be used for "
            "training.",
            status=404,
            retryable=False,
        ) from error


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except UNREADABLE as error:
        raise BadResponse(
            f"a server answered with something that is not JSON ({error})."
        ) from error
