"""Limits of a request: its head, its body, the JSON in it, and work for a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from rolltree._helpers.untrusted import read_json
from rolltree.web.guard import RawHeaders, RequestError, header

if TYPE_CHECKING:
    from starlette.requests import Request

ResultT = TypeVar("ResultT")
Receive = Callable[[], Awaitable[Any]]

# A million ids are 7 MB of JSON.
MAX_BODY_BYTES = 16 * 2**20
# Decoding blocks the interpreter, and `/health` with it: five million empty objects take a second.
MAX_CONTAINERS = 200_000
MAX_HEAD_BYTES = 64 * 2**10
READ_TIMEOUT_S = 30.0


class ClientLeft(Exception):
    """The client disconnected before its request was answered."""


def is_too_large(headers: RawHeaders) -> bool:
    """Whether a request declares a body larger than `MAX_BODY_BYTES`."""
    declared = header(headers, b"content-length") or ""
    return declared.isdecimal() and (len(declared) > 19 or int(declared) > MAX_BODY_BYTES)


async def json_body(request: Request) -> dict[str, Any]:
    """Return the request's JSON object; raises as `request_body` and `object_in` do."""
    return object_in(await request_body(request))


async def request_body(request: Request) -> bytes:
    """Return the request's body.

    Raises:
        RequestError: it is larger than `MAX_BODY_BYTES`, or did not arrive in time.
        ClientLeft: the client disconnected.
    """
    limit_s = request.app.state.read_timeout_s
    parts, size, receive, is_whole = list[bytes](), 0, request.receive, False
    too_large = RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes.", status=413)
    if is_too_large(request.scope["headers"]):
        raise too_large
    try:
        async with asyncio.timeout(limit_s):
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                is_whole = not message.get("more_body", False)
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {limit_s:g} s.", status=408) from error
    return b"".join(parts)


def object_in(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; lone surrogates in it become U+FFFD.

    Raises:
        RequestError: it has more than `MAX_CONTAINERS`, or is not a JSON object.
    """
    # Counted in the raw bytes, before decoding; exactly only if a prompt may have many brackets.
    brackets = content.count(b"{") + content.count(b"[")
    if brackets > MAX_CONTAINERS and _num_containers(content) > MAX_CONTAINERS:
        raise RequestError(
            f"the body has more than {MAX_CONTAINERS:,} objects and lists.", status=413
        )
    try:
        try:
            body = msgspec.json.decode(content)
        except (ValueError, msgspec.MsgspecError):
            # An agent sends back what a model wrote, which may be half of a surrogate pair.
            if b"\\u" not in content:
                raise
            body = read_json(content.decode())
    # MsgspecError: older releases of msgspec do not make it a ValueError. RecursionError: objects
    # nested deeper than msgspec or the interpreter allows.
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise RequestError("the body is JSON, but not an object.")
    return body


def _num_containers(content: bytes) -> int:
    """Return how many objects and lists a JSON text has; brackets in its strings do not count."""
    # Without escaped quotes, every quote begins or ends a string.
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    in_string = np.cumsum(text == ord('"'), dtype=np.uint8) % 2  # wraps at 256, which is even
    brackets = (text == ord("{")) | (text == ord("["))
    return int(np.count_nonzero(brackets & (in_string == 0)))


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work`, and cancel it if the client disconnects. The body must have been read.

    Raises:
        ClientLeft: the client disconnected.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None

    def leave(_: object) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    # The requests of a client that disconnected would keep their slots in the batch for nothing.
    leaving = asyncio.ensure_future(_left(request.receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # 0: only the disconnect cancelled this task.
        if has_left and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def has_left(receive: Receive) -> bool:
    """Whether the server knows that the client has left. The body must have been read."""
    coming = _left(receive)
    try:
        coming.send(None)
    except StopIteration:
        return True
    coming.close()
    return False
