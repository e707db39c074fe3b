"""Blocking `openai.OpenAI` clients as asynchronous ones, in threads."""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

from rolltree.environments.openai_view import openai_view
from rolltree.threads import run_in_thread

logger = logging.getLogger("rolltree.compat")


def is_blocking(client: Any) -> bool:
    """Return whether it is a client of the openai package that is not asynchronous."""
    ours = any(kind.__module__.partition(".")[0] == "openai" for kind in type(client).__mro__)
    return ours and not hasattr(client, "__aenter__") and hasattr(client, "chat")


def async_client(client: Any) -> Any:
    """Return a client whose `create` methods can be awaited: a blocking one is asked in threads.

    A model client of rolltree's gets OpenAI's methods; everything else passes through.
    """
    if client is None or not is_blocking(client):
        return openai_view(client)
    _warn_of_threads()
    return ThreadedOpenAI(client)


@cache
def _warn_of_threads() -> None:
    logger.warning(
        "a blocking openai.OpenAI client is asked in threads, one per request, which costs more "
        "than openai.AsyncOpenAI would."
    )


async def answer_of(asked: Any) -> Any:
    """Return what a `create` call gave, awaited if it can be."""
    return await asked if inspect.isawaitable(asked) else asked


class ThreadedOpenAI:
    """A blocking client whose `chat.completions.create` and `completions.create` are awaited.

    Everything else is the client's own.
    """

    def __init__(self, client: Any) -> None:
        self.blocking_client = client
        self.chat = _Chat(client.chat)
        self.completions = _Endpoint(client.completions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocking_client, name)


class _Endpoint:
    def __init__(self, blocking: Any) -> None:
        self._blocking = blocking

    async def create(self, **fields: Any) -> Any:
        """Ask once, in a thread that ends when nobody waits for the answer."""
        return await run_in_thread(lambda: self._blocking.create(**fields), name="openai-request")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocking, name)


class _Chat(_Endpoint):
    @property
    def completions(self) -> _Endpoint:
        return _Endpoint(self._blocking.completions)
