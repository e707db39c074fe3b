"""A model client with OpenAI's methods, for environments that call `state["client"]`.

It turns `client.chat.completions.create(...)` and `client.completions.create(...)` into calls of
the client behind it, so that a simulated user or a judge inside an environment needs no second
connection. Streaming and several completions at once are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltree.inference.client import ModelClient, sampling_from_args
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import Messages, MessageType, ModelResponse, ToolSchema


class OpenAIView:
    """A `ModelClient` as an `AsyncOpenAI`, in the methods that environments use.

    Example:
        >>> async def reply(state):
        ...     said = await state["client"].chat.completions.create(
        ...         model=state["model"], messages=[{"role": "user", "content": "7 + 5 ="}]
        ...     )
        ...     return said.choices[0].message.content
    """

    # A name that no SDK uses: every other attribute is looked up on the client behind.
    __slots__ = ("__rolltree_client__",)

    def __init__(self, client: ModelClient) -> None:
        self.__rolltree_client__ = client

    @property
    def model(self) -> str:
        """The model of calls that do not name one."""
        return self.__rolltree_client__.model

    @property
    def chat(self) -> _Chat:
        """The chat endpoint; it can also be called as `ModelClient.chat`."""
        return _Chat(self.__rolltree_client__)

    @property
    def completions(self) -> _Endpoint:
        """The text endpoint."""
        return _Endpoint(self.__rolltree_client__, "completion")

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look up such names before there is a client.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__rolltree_client__, name)


class _Endpoint:
    """One endpoint with its `create`."""

    def __init__(self, client: ModelClient, message_type: MessageType) -> None:
        self._client = client
        self._type = message_type

    async def create(
        self,
        *,
        model: str | None = None,
        messages: Messages | None = None,
        prompt: Messages | None = None,
        tools: Sequence[ToolSchema] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> ModelResponse:
        """Call the model once; `fields` are OpenAI's.

        Raises:
            UnsupportedSetting: `stream` is set.
            ModelError: there was no usable response.
        """
        if stream:
            raise UnsupportedSetting(
                "streaming is not supported here, because a streamed answer would not be "
                "recorded. Call create() without stream."
            )
        asked = messages if self._type == "chat" else prompt
        return await self._client.chat(
            asked if asked is not None else [],
            tools=tools or None,
            sampling=sampling_from_args(fields),
            model=model,
            message_type=self._type,
        )


class _Chat:
    def __init__(self, client: ModelClient) -> None:
        self._client = client

    @property
    def completions(self) -> _Endpoint:
        return _Endpoint(self._client, "chat")

    async def __call__(self, *args: Any, **settings: Any) -> Any:
        return await self._client.chat(*args, **settings)


def openai_view(client: Any) -> Any:
    """Return `client` if it has OpenAI's methods, else a view that has; None for None."""
    if client is None or hasattr(getattr(client, "chat", None), "completions"):
        return client
    return OpenAIView(client)
