"""Computes how many tokens fit after a prompt, for servers that need a `max_tokens`.

vLLM's `/v1/completions` treats a missing or null `max_tokens` as 16 and cuts the answer there.
`/v1/models` says how long prompt and completion may be together, and `/tokenize` how long a
string is.
"""

from __future__ import annotations

import msgspec

from rolltree.inference.http import HttpClient
from rolltree.inference.wire import UNREADABLE, Response
from rolltree.values.errors import ModelError

DEFAULT_MAX_TOKENS = 16


def cut_by_default(response: Response) -> bool:
    """Whether an answer to a request without a limit was cut at the default of servers."""
    if not response.choices or response.choices[0].finish_reason != "length":
        return False
    # Counted ids are certain; `usage` is only what the server says.
    ids, usage = response.choices[0].token_ids, response.usage
    num_tokens = len(ids) if ids is not None else usage.completion_tokens if usage else None
    return num_tokens == DEFAULT_MAX_TOKENS


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Count(msgspec.Struct):
    count: int


class ContextLimit:
    """The context windows of one server's models, asked for once.

    `is_needed`: the server has cut an answer to a request without a limit.
    """

    def __init__(self, server: HttpClient) -> None:
        self.is_needed = False
        self._server = server
        self._contexts: dict[str, int] | None = None

    async def remaining(self, prompt: list[int] | str, model: str) -> int | None:
        """Return how many tokens fit after `prompt`.

        Returns None if the server doesn't say, or if none fit.
        """
        context = await self.context(model)
        if context is None:
            return None
        # Only the server knows how it splits a string.
        size = await self._ask_size(prompt, model) if isinstance(prompt, str) else len(prompt)
        return context - size if size is not None and size < context else None

    async def context(self, model: str) -> int | None:
        """Return the most tokens of a prompt and its completion; None if the server says nothing.

        Asked only once, even if that failed: a server that lacks this path will not get it later.
        """
        if self._contexts is None:
            self._contexts = await self._ask_contexts()
        return self._contexts.get(model)

    async def _ask_contexts(self) -> dict[str, int]:
        try:
            found = (await self._server.post("/models", None, _decode_models)).value
        except ModelError:
            return {}
        return {m.id: m.max_model_len for m in found.data if m.max_model_len is not None}

    async def _ask_size(self, prompt: str, model: str) -> int | None:
        body = {"model": model, "prompt": prompt}
        try:
            return (await self._server.post("/tokenize", body, _decode_count, at_root=True)).value
        except ModelError:
            return None


def _decode_models(body: bytes) -> _Models:
    try:
        return msgspec.json.decode(body, type=_Models)
    except UNREADABLE:
        return _Models([])


def _decode_count(body: bytes) -> int | None:
    try:
        return msgspec.json.decode(body, type=_Count).count
    except UNREADABLE:
        return None
