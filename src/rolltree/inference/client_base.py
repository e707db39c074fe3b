"""What model clients share: `chat` and `generate`, sessions with memory, and delegation.

A client of a model is a `RootClient` and implements `respond`. What goes around a client (limits,
seeds, budgets, faults) is a `DelegatingClient`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from reprlib import repr as shown
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from rolltree.inference.call import DEFAULT_SAMPLING, ModelCall
from rolltree.inference.client import ModelClient, policy_version, sampling_from_args
from rolltree.inference.session import TokenSession, without_ids
from rolltree.values.errors import ConfigError, UnsupportedSetting
from rolltree.values.types import (
    GenerateRequest,
    Messages,
    MessageType,
    ModelResponse,
    SamplingArgs,
    SamplingParams,
    ToolSchema,
)

MemoryT = TypeVar("MemoryT")


class ClientBase(ABC):
    """Implements `ModelClient` in terms of `call`."""

    takes_calls: ClassVar[bool] = True
    """False if `chat` or `generate` is overridden: then `call` may not replace them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # If a subclass overrides these, calls must go through them: `ModelCall.to` checks this.
        is_own = cls.chat is ClientBase.chat and cls.generate is ClientBase.generate
        cls.takes_calls = is_own

    @property
    @abstractmethod
    def model(self) -> str:
        """The default model for calls."""

    @property
    def version(self) -> int:
        """The version of the weights that the model was last given; 0 if unknown."""
        return 0

    @abstractmethod
    def session(self) -> ModelClient:
        """Return a client for one rollout that remembers its calls."""

    @abstractmethod
    async def call(self, call: ModelCall) -> ModelResponse:
        """Make one call; errors are those of `ModelClient`."""

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams | SamplingArgs = DEFAULT_SAMPLING,
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Sample the next assistant message, or continue a string (`message_type="completion"`)."""
        if not isinstance(sampling, SamplingParams):
            sampling = sampling_from_args(sampling)
        return await self.call(ModelCall(messages, sampling, model, tools, message_type))

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly `request.prompt_ids`."""
        if not isinstance(request, GenerateRequest):
            raise ConfigError(
                f"generate takes a GenerateRequest, not {shown(request)}, so it is unclear how to "
                "sample. Write GenerateRequest(prompt_ids, SamplingParams(max_tokens=16))."
            )
        ids = np.asarray(request.prompt_ids, np.int32)
        return await self.call(ModelCall(ids, request.sampling, request.model))

    async def aclose(self) -> None:  # noqa: B027  (most clients own nothing)
        """Do nothing: this client owns no connections."""


class DelegatingClient(ClientBase):
    """A client in front of an inner client, with sessions in front of the inner one's sessions.

    A session is a copy of the client, so the objects in its attributes are shared.
    """

    def __init__(self, inner: ModelClient) -> None:
        self._inner = inner

    @property
    def clients(self) -> list[Any]:
        """The inner client, which calls are passed on to."""
        return [self._inner]

    @property
    def model(self) -> str:
        """The inner client's model."""
        return self._inner.model

    @property
    def version(self) -> int:
        """The inner client's version."""
        return policy_version(self._inner)

    def session(self) -> ModelClient:
        """Return this client in front of a session of the inner one."""
        # A copy instead of a new object, since subclasses take different arguments.
        session = copy.copy(self)
        session._inner = self._inner.session()
        return session

    async def call(self, call: ModelCall) -> ModelResponse:
        """Pass the call on."""
        return await call.to(self._inner)


class RootClient(ClientBase, Generic[MemoryT]):
    """A client that calls a model itself; each of its sessions remembers its calls."""

    @abstractmethod
    def new_memory(self) -> MemoryT:
        """Return the empty memory of a new session."""

    @abstractmethod
    async def respond(self, call: ModelCall, memory: MemoryT) -> ModelResponse:
        """Make one call of the session with this `memory`."""

    def session(self) -> Session[MemoryT]:
        """Return a client for one rollout that remembers its calls."""
        return Session(self, self.new_memory())

    async def call(self, call: ModelCall) -> ModelResponse:
        """Make one call, without memory of earlier ones."""
        return await self.respond(call, self.new_memory())

    def recall(self, call: ModelCall, response: ModelResponse, memory: MemoryT) -> ModelResponse:
        """Add a call that was made elsewhere to a session's memory; see `Session.remember`."""
        # Only a session that renders prompts can tell whether ids are this model's.
        if not isinstance(memory, TokenSession) or isinstance(call.prompt, np.ndarray):
            return without_ids(response)
        return memory.remember(call.prompt, call.tools, call.model, response)


class Session(DelegatingClient, Generic[MemoryT]):
    """One rollout's view of a client, whose connections it shares."""

    def __init__(self, client: RootClient[MemoryT], memory: MemoryT) -> None:
        super().__init__(client)
        self._client, self._memory = client, memory

    def session(self) -> Session[MemoryT]:
        """Return a new, empty session."""
        return self._client.session()

    def moved_to(self, client: RootClient[MemoryT]) -> Session[MemoryT]:
        """Return this session, with its memory, on another server of the same model."""
        # Ids depend on the model, not on the server.
        return Session(client, self._memory)

    def call(self, call: ModelCall) -> Coroutine[Any, Any, ModelResponse]:
        """Make one call, which continues an earlier one if possible."""
        return self._client.respond(call, self._memory)

    def remember(self, call: ModelCall, response: ModelResponse) -> ModelResponse:
        """Record a call that was made and answered elsewhere, such as one in a stored run.

        Later prompts can continue it. Returns the response as stored in this session's tree:
        without ids unless they are this model's; unchanged if the prompt is ids.
        """
        # No later prompt continues a prompt of ids.
        if isinstance(call.prompt, np.ndarray):
            return response
        return self._client.recall(call, response, self._memory)


def check_model(asked: str | None, known: str) -> None:
    """Raise `UnsupportedSetting` if a model other than `known` is requested."""
    if asked not in (None, known):
        raise UnsupportedSetting(
            f"this client serves {known!r}, but {asked!r} was requested, so the answer would be "
            "attributed to the wrong model. Leave the model's name out."
        )
