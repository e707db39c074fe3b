"""JSON answers of the servers on starlette, also to exceptions of their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rolltree.web.limits import ClientLeft

Handler = Callable[[Request], Awaitable[Response]]


def json_response(value: object, status: int = 200) -> Response:
    """Return a response with `value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(status: int, body: object, closing: Collection[int] = (408, 413)) -> Response:
    """Return an error response; one with a status in `closing` ends the connection."""
    response = json_response(body, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in closing:
        # An unread rest of the body would be parsed as the next request.
        response.headers["Connection"] = "close"
    return response


def answering_errors(handler: Handler, fail: Callable[[Request, Exception], Response]) -> Handler:
    """Wrap a handler so that `fail` answers for its exceptions."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  (`fail` answers)
            return fail(request, error)

    return run
