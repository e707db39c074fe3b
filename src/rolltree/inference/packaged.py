"""The PyPI package `renderers` behind `ChatRenderer`: prompts by code per model family.

    renderer = PackagedRenderer(tokenizer, "qwen3")
    client = OpenAIClient(url, model, renderer=renderer)

The package writes first prompts and continues earlier ones; what it cannot continue exactly (it
says so by giving nothing) goes through the glue learned from the tokenizer's own template, like
everything else here: parsing answers, end tokens, text. It knows the package's interface (0.1) and
no model. It leaves out images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltree.errors import ConfigError
from rolltree.inference.chat import ChatRenderer, Continuation
from rolltree.inference.vocabulary import Tokenizer
from rolltree.types import ChatMessage, IntArray, ToolSchema


class PackagedRenderer(ChatRenderer):
    """A `ChatRenderer` whose prompts `renderers` writes.

    Args:
        tokenizer: as for `ChatRenderer`.
        family: the package's name for the model family, such as "qwen3", or a renderer of the
            package that was made elsewhere.
        options: `ChatRenderer`'s.

    Raises:
        ConfigError: the package is not installed, or has no such family.
    """

    def __init__(self, tokenizer: Tokenizer, family: str | Any, **options: Any) -> None:
        self._writer = _make(tokenizer, family) if isinstance(family, str) else family
        stops = tuple(int(token) for token in self._writer.get_stop_token_ids())
        options["end_ids"] = (*options.get("end_ids", ()), *stops)
        super().__init__(tokenizer, **options)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        """Return the prompt of a whole conversation, int32 `[_T]`."""
        ids = self._writer.render_ids(
            list(messages), tools=_specs(tools), add_generation_prompt=add_generation_prompt
        )
        return np.asarray(ids, np.int32)

    def continuation(
        self,
        previous_ids: IntArray,
        messages: Sequence[ChatMessage],
        num_old: int,
        tools: Sequence[ToolSchema] | None = None,
    ) -> Continuation:
        """Return how the prompt for `messages` continues an earlier call, as `ChatRenderer` does.

        The package's bridge is taken where its ids begin with the earlier call's, which is checked.
        Its cost is O(history) per turn.
        """
        known, new = np.asarray(previous_ids, np.int32), list(messages[num_old:])
        bridged = self._writer.bridge_to_next_turn(known.tolist(), [], new, tools=_specs(tools))
        ids = np.asarray(bridged.token_ids if bridged is not None else [], np.int32)
        if len(ids) > len(known) and np.array_equal(ids[: len(known)], known):
            return Continuation(ids[len(known) :])
        return super().continuation(previous_ids, messages, num_old, tools)


def _specs(tools: Sequence[ToolSchema] | None) -> list[Any] | None:
    """Return tools as the package takes them: the functions alone."""
    return [tool.get("function", tool) for tool in tools] if tools else None


def _make(tokenizer: Tokenizer, family: str) -> Any:
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise ConfigError(
            f"prompts by the package `renderers` need it, and it cannot be imported ({error}). "
            "pip install 'rolltree[renderers]', or use ChatRenderer(tokenizer)."
        ) from error
    try:
        return create_renderer(tokenizer, config_from_name(family))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"`renderers` cannot write prompts for {family!r} ({error}). Use one of its names, or "
            "ChatRenderer(tokenizer), which learns any template."
        ) from error
