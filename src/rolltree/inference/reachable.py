"""What servers say before an evaluation: whether they answer at all, and which weights they have.

A server keeps what a trainer gave it when the run has ended or was killed, under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any

from rolltree.errors import ConnectionFailed, ModelError
from rolltree.inference.http import HttpClient
from rolltree.inference.publish import call, served_version
from rolltree.inference.retry import RetryPolicy

_ONCE = RetryPolicy(max_retries=0)
_ASK_S = 5.0
FIRST_ANSWER_S = 5.0
"""How long servers of which none has ever answered are waited for."""


async def check_servers(client: object, *, limit_s: float = FIRST_ANSWER_S) -> list[str]:
    """Ask the servers behind a client, and return what a person should know of their weights.

    Tokens of servers that do not report the version of each get the one that is found here.

    Raises:
        ConnectionFailed: none of them answered within `limit_s`.
    """
    parts = [part for part in _with_server(client) if getattr(part, "fleet", None) is None]
    if not parts:
        return []
    await _answer(parts, limit_s)
    return [said for said in await asyncio.gather(*map(_weights, parts)) if said]


def _with_server(client: object) -> Iterator[Any]:
    if isinstance(getattr(client, "server", None), HttpClient):
        yield client
    for part in getattr(client, "clients", ()):
        yield from _with_server(part)


async def _answer(parts: list[Any], limit_s: float) -> None:
    """Return when one of them answers."""
    began = monotonic()
    number = 0
    while True:
        errors = await asyncio.gather(*(_error(part.server, limit_s) for part in parts))
        if None in errors:
            return
        wait_s = 0.2 * 2**number
        if monotonic() - began + wait_s > limit_s:
            break
        await asyncio.sleep(wait_s)
        number += 1
    raise ConnectionFailed(
        f"no server has answered for {monotonic() - began:.0f} s, so nothing was sampled: "
        f"{' '.join(map(str, errors))} Start the server, or check the URL and its port."
    ) from errors[0]


async def _error(server: HttpClient, limit_s: float) -> ModelError | None:
    try:
        await server.check_reachable(limit_s)
    except ConnectionFailed as error:
        return error
    return None


async def _weights(part: Any) -> str | None:
    """Return what is unusual about a server's weights; None too where it does not say."""
    server: HttpClient = part.server
    try:
        label = await served_version(server, timeout_s=_ASK_S, retry=_ONCE)
        paused = await call(server, "/is_paused", None, timeout_s=_ASK_S, retry=_ONCE)
    except ModelError:
        return None
    if isinstance(paused, dict) and paused.get("is_paused") is True:
        return (
            f"{server.root_url} is paused, as a trainer leaves it that dies while it publishes: "
            "calls wait until it is resumed (POST /resume) or started again."
        )
    if label in ("default", str(part.version)):  # version 0 is what a run began with
        return None
    if label.isdecimal() and len(label) < 10:
        part.version = int(label)
    return (
        f"{server.root_url} says that its weights are version {label[:40]!r}, which a training run "
        f"gave it: these are measured, and not the weights that {part.model!r} was started with. "
        "Start the server again to measure those."
    )
