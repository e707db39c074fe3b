"""The interface of a protocol: its fields, functions between bodies and calls, and its events.

`rolltree.gateway.wire` lists the protocols. A protocol knows nothing about trees and connections;
of the session it uses what `Answering` has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead, CallOrigin
from rolltree.gateway.failures import Failure, openai_error
from rolltree.gateway.fields import Field
from rolltree.values.types import ChatMessage, SamplingParams


class Answering(Protocol):
    """What answers calls: a session, or a served model, which remembers none of them."""

    keeps_answers: ClassVar[bool]
    """Whether later requests can refer to an answer."""

    @property
    def drop_fields(self) -> Sequence[str]:
        """The names of the fields that are taken out of every request."""
        ...

    @property
    def gives_top_logprobs(self) -> bool:
        """Whether answers can have the likeliest tokens at each place."""
        ...

    @property
    def model_name(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def opened_s(self) -> float:
        """Since when it answers, in seconds since the epoch."""
        ...

    def messages(self, value: object) -> list[ChatMessage]:
        """Return OpenAI's chat messages in the form in which they are rendered."""
        ...

    def check_size(self, size: int, what: str) -> None:
        """Raise `PromptTooLong` for so many "ids" if the model's context cannot hold them."""
        ...

    def sampling_for(self, asked: SamplingParams) -> SamplingParams:
        """Return the settings with which a call that asks for `asked` is sampled."""
        ...

    def conversation(self, answer_id: str) -> list[ChatMessage]:
        """Return the messages of an earlier call and its answer."""
        ...

    def answer(self, answer_id: str) -> AgentAnswer:
        """Return an earlier answer."""
        ...

    async def count_tokens(self, call: AgentCall) -> int:
        """Return how many tokens the prompt of a call has."""
        ...

    async def answers(self, call: AgentCall, origin: CallOrigin) -> list[AgentAnswer]:
        """Answer a call; cancelling this cancels the sampling."""
        ...

    def stream(
        self, call: AgentCall, origin: CallOrigin
    ) -> AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None]:
        """Yield the head of the answers, their deltas, and each answer when it is finished."""
        ...

    async def write(self, call: AgentCall, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the body that `work` writes, which may decode many tokens."""
        ...

    def delivered(self, answer: AgentAnswer) -> None:
        """Note that an answer was sent in full."""
        ...


class EventWriter(Protocol):
    """Writes the events of the answers to one streamed request, each item the bytes of one."""

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return the first events, before anything is sampled."""
        ...

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the events for a delta."""
        ...

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the last events of an answer: its `rest`, and how it ended."""
        ...

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the events that end the stream with an error."""
        ...


SideHandler: TypeAlias = Callable[
    [Answering, Mapping[str, Any], Mapping[str, str]], Awaitable[dict[str, Any]]
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
        echoes_id: whether an answer's id contains the client's own id of the request
            (`X-Request-Id`), if the session allows it.
    """

    name: str
    path: str
    fields: Mapping[str, Field]
    read: Callable[[Mapping[str, Any], Answering], AgentCall]
    write: Callable[[AgentCall, Sequence[AgentAnswer]], dict[str, Any]]
    events: Callable[[AgentCall], EventWriter]
    error: Callable[[Failure], dict[str, Any]] = openai_error
    sides: Mapping[tuple[str, str], SideHandler] = field(default_factory=dict)
    ping: bytes = b": ping\n\n"
    echoes_id: bool = False


def data_event(value: object, name: str | None = None) -> bytes:
    """Return a server-sent event with JSON as its data, and a name if the protocol uses names.

    >>> data_event({"a": 1}, "ping")
    b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"
