"""The interface of a protocol: its fields, functions between bodies and calls, and its events.

`rolltree.gateway.app` lists the protocols. A protocol knows nothing about trees and connections;
of a session it uses only `model_name`, `conversation`, `answer` and `count_tokens`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.fields import Field
from rolltree.gateway.serve.requests import Failure, openai_error
from rolltree.gateway.session import GatewaySession


class EventWriter(Protocol):
    """Writes the events of one streamed answer; each item is the bytes of one event."""

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return the first events, before anything is sampled."""
        ...

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the events for a delta."""
        ...

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the last events, after all deltas."""
        ...

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the events that end the stream with an error."""
        ...


SideHandler: TypeAlias = Callable[
    [GatewaySession, Mapping[str, Any], Mapping[str, str]], Awaitable[dict[str, Any]]
]
"""Answers a further path of a protocol: session, body (empty for GET), path parameters."""


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """One HTTP API through which agents call the model.

    Args:
        name: for logs and errors.
        path: the path to which calls are posted, below the session's `/v1`.
        fields: how each field is used.
        read: turns a request body and the session into a call.
        write: turns the call and its `n` answers into the body of the response.
        events: returns the writer of a streamed answer.
        error: turns a failure into the body of an error response.
        sides: further paths, by method and path (`("POST", "/messages/count_tokens")`).
        ping: an event that keeps a stream alive while nothing is sampled yet.
    """

    name: str
    path: str
    fields: Mapping[str, Field]
    read: Callable[[Mapping[str, Any], GatewaySession], AgentCall]
    write: Callable[[AgentCall, Sequence[AgentAnswer]], dict[str, Any]]
    events: Callable[[AgentCall], EventWriter]
    error: Callable[[Failure], dict[str, Any]] = openai_error
    sides: Mapping[tuple[str, str], SideHandler] = field(default_factory=dict)
    ping: bytes = b": ping\n\n"


def data_event(value: object, name: str | None = None) -> bytes:
    """Return a server-sent event with JSON as its data, and a name if the protocol uses names.

    >>> data_event({"a": 1}, "ping")
    b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"
