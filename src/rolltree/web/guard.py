"""Who is answered: tokens, hosts and origins in the headers of a request, for every server.

It imports the standard library only, since vLLM's process loads `RequireToken`. Headers are pairs
of bytes, as in ASGI's scope and aiohttp's `raw_headers`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Collection, Iterable
from typing import Any

RawHeaders = Iterable[tuple[bytes, bytes]]

NO_RUN_TOKEN = "this server accepts only requests with the run's token"


class RequestError(Exception):
    """An error that is answered with `status` and its message; `param` is the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def header(headers: RawHeaders, name: bytes) -> str | None:
    """Return the value of a header (`name` in lower case), or None without it.

    One that comes twice is empty: a proxy may have checked the other.
    """
    size = len(name)
    found = [value for key, value in headers if len(key) == size and key.lower() == name]
    return None if not found else found[0].decode("latin-1") if len(found) == 1 else ""


def has_token(headers: RawHeaders, token: str) -> bool:
    """Whether a request has this bearer token (RFC 6750)."""
    given = (header(headers, b"authorization") or "").encode("latin-1")
    # In constant time, since a comparison that ends early reveals how much of a guess is right.
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def key_in(headers: RawHeaders) -> str:
    """Return the key that OpenAI's and Anthropic's clients send: a bearer token, or `x-api-key`."""
    kind, _, key = (header(headers, b"authorization") or "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else header(headers, b"x-api-key") or ""


def digest_of(secret: str) -> str:
    """Return the digest that is stored instead of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def has_digest(given: str, digest: str) -> bool:
    """Whether `given` is the secret with this digest."""
    return hmac.compare_digest(digest_of(given), digest)


def foreign_request(
    headers: RawHeaders, hosts: Collection[str], origins: Collection[str] = ()
) -> RequestError | None:
    """Return the refusal of a request that a web page may have sent, or None."""
    # A web page can resolve its own name to 127.0.0.1 (DNS rebinding), which makes it same-origin,
    # so only requests to known host names are answered.
    if header(headers, b"host") not in hosts:
        return RequestError(
            "this server answers only under the address that it printed.", status=421
        )
    # Browsers send the origin of the page; other programs send none, and need the token anyway.
    if header(headers, b"origin") not in (None, *origins):
        return RequestError("the request comes from another page.", status=403)
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_at(host: str, port: int) -> str:
    """Return the URL of a server, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class RequireToken:
    """Middleware for a run's vLLM server (`--middleware`): 401 without the token in `VLLM_API_KEY`.

    vLLM itself requires it only for `/v1` and the like, not for weight updates and remote calls.
    `/health` needs no token.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._token = app, os.environ["VLLM_API_KEY"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        is_open = scope["type"] not in ("http", "websocket") or scope["path"] == "/health"
        if is_open or has_token(scope["headers"], self._token):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            body = json.dumps({"error": NO_RUN_TOKEN}).encode()
            await send({"type": "http.response.body", "body": body})
