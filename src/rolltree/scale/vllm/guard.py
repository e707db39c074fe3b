"""Middleware for a run's vLLM server (`--middleware`): every request needs the run's token.

vLLM itself requires `VLLM_API_KEY` only for `/v1` and the like, not for weight updates and remote
calls.
"""

from __future__ import annotations

import hmac
import os
from typing import Any


class RequireToken:
    """ASGI middleware that answers 401 without the token in `VLLM_API_KEY`, except `/health`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._bearer = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._bearer):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            body = b'{"error": "this server accepts only requests with the run\'s token"}'
            await send({"type": "http.response.body", "body": body})
