"""The token side of a rollout: from messages to exact prompt ids, from sampled ids to a message.

`TokenSession.prepare` gives the ids to send, `TokenSession.complete` turns what was sampled into a
`ModelResponse` and remembers the call. A prompt that continues an earlier call is that call's exact
ids plus only what is new. It knows nothing about where the ids go: an engine in this process, a
server, a script. It leaves out retries and HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltree.errors import ConfigError, TokenError
from rolltree.inference.buffer import IdPath
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.memory import CallMemory
from rolltree.tokens.buffers import checked_logprobs
from rolltree.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    ToolSchema,
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine sampled after a prompt.

    Shapes: `ids` int32 `[_C]`, end token included where one was sampled; `logprobs` float32 `[_C]`
    of the distribution sampled from; `versions` int32 `[_C]` or one for all. `text` is given where
    it is not the decoded ids, as when a stop string, which is among the ids, is cut off.
    """

    ids: Sequence[int] | IntArray
    logprobs: Sequence[float] | FloatArray | None
    finish_reason: FinishReason
    versions: int | Sequence[int] | IntArray = 0
    text: str | None = None
    raw: Any = None
    wait_s: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids to send, int32 `[_P]`, and how they came about.

    `extends` names the call that they continue exactly. `reason` says why they do not continue a
    call whose messages come first in the history, where that is so.
    """

    ids: IntArray
    extends: int | None
    reason: str | None
    path: IdPath
    messages: Messages
    tools: Sequence[ToolSchema] | None
    model: str | None


@dataclass(frozen=True, slots=True)
class _Call:
    call_id: int
    path: IdPath  # prompt and completion


class TokenSession:
    """The calls of one rollout, for a client that sends token ids.

    One object serves one rollout, with any number of agents and branches in it. `prepare` and
    `complete` are not to be called from several threads at once; calls that overlap in one event
    loop are fine.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._memory: CallMemory[_Call] = CallMemory()
        self._texts: list[tuple[str | None, str, IdPath, _Call]] = []

    def prepare(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None = None,
        *,
        message_type: MessageType = "chat",
        model: str | None = None,
    ) -> Prompt:
        """Return the prompt for `messages` (a string when `message_type` is "completion").

        Raises:
            TemplateError: the template refuses these messages.
            ConfigError: messages and `message_type` do not fit.
        """
        check_message_type(messages, message_type)
        if isinstance(messages, str):
            return self._prepare_text(messages, model)
        messages = list(messages)  # the caller may append to its list while the engine samples
        match = self._memory.find(messages, tools, model)
        if match is None:
            path = IdPath.of(self.renderer.render(messages, tools))
            return Prompt(path.ids, None, None, path, messages, tools, model)
        call = match.call
        found = self.renderer.continuation(call.path.ids, messages, match.num_old, tools)
        if found.suffix is not None:
            path = call.path.extended(found.suffix)
            return Prompt(path.ids, call.call_id, None, path, messages, tools, model)
        assert found.rendered is not None
        path = IdPath.of(found.rendered)
        return Prompt(path.ids, None, found.reason, path, messages, tools, model)

    def complete(self, prompt: Prompt, sampled: Sampled, *, temperature: float) -> ModelResponse:
        """Return the `ModelResponse` for what was sampled after `prompt`, and remember the call.

        Raises:
            TokenError: the sampled arrays contradict each other.
        """
        ids = np.array(sampled.ids, np.int32)
        logprobs, versions = check_sampled(ids, sampled.logprobs, sampled.versions)
        text = self.renderer.decode_answer(ids) if sampled.text is None else sampled.text
        message, finish_reason = self._message(prompt, text, sampled.finish_reason)
        made = ModelResponse(
            message=message,
            text=text,
            finish_reason=finish_reason,
            prompt_ids=prompt.ids,
            completion_ids=ids,
            logprobs=logprobs,
            versions=versions,
            temperature=temperature,
            extends=prompt.extends,
            raw=sampled.raw,
            num_prompt_tokens=len(prompt.ids),
            num_completion_tokens=len(ids),
            wait_s=sampled.wait_s,
            info={**sampled.info, **({"rerendered": prompt.reason} if prompt.reason else {})},
        )
        call = _Call(made.call_id, prompt.path.extended(ids))
        if isinstance(prompt.messages, str):
            num_kept, kept_text = self._spelled_out(ids, text)
            path = prompt.path.extended(ids[:num_kept]) if num_kept < len(ids) else call.path
            self._texts.append((prompt.model, prompt.messages + kept_text, path, call))
        else:
            self._memory.add(prompt.messages, message, call, prompt.tools, prompt.model)
        return made

    def complete_text(
        self,
        prompt: Prompt,
        text: str,
        finish_reason: FinishReason,
        *,
        temperature: float,
        raw: Any = None,
        wait_s: float = 0.0,
        info: Mapping[str, Any] | None = None,
    ) -> ModelResponse:
        """Return the `ModelResponse` for an answer without ids. No later call can continue it."""
        message, finish_reason = self._message(prompt, text, finish_reason)
        return ModelResponse(
            message=message,
            text=text,
            finish_reason=finish_reason,
            prompt_ids=None,
            completion_ids=None,
            logprobs=None,
            versions=None,
            temperature=temperature,
            raw=raw,
            num_prompt_tokens=len(prompt.ids),
            wait_s=wait_s,
            info=dict(info or {}),
        )

    def _message(
        self, prompt: Prompt, text: str, finish_reason: FinishReason
    ) -> tuple[ChatMessage, FinishReason]:
        if isinstance(prompt.messages, str):
            return {"role": "assistant", "content": text}, finish_reason
        parsed = self.renderer.parse_text(text, finish_reason, prompt.tools)
        return parsed.message, parsed.finish_reason

    def _prepare_text(self, text: str, model: str | None) -> Prompt:
        best: tuple[str | None, str, IdPath, _Call] | None = None
        for entry in self._texts:
            longer = best is None or len(entry[1]) >= len(best[1])
            if longer and entry[0] == model and text.startswith(entry[1]):
                best = entry
        if best is None:
            path = IdPath.of(self.renderer.encode_text(text))
            return Prompt(path.ids, None, None, path, text, None, model)
        _, known, kept, call = best
        path = kept.extended(self.renderer.encode_text(text[len(known) :], start=False))
        size = len(call.path)
        exact = len(kept) == size or np.array_equal(path.ids[:size], call.path.ids)
        reason = None if exact else "the string leaves out tokens that were sampled at the end"
        return Prompt(path.ids, call.call_id if exact else None, reason, path, text, None, model)

    def _spelled_out(self, ids: IntArray, text: str) -> tuple[int, str]:
        """Return how many of `ids` the `text` spells out from its start, and that part of it.

        End tokens and stop strings are sampled but are not part of the text.
        """
        for num_kept in range(len(ids), 0, -1):
            spelled = self.renderer.decode(ids[:num_kept])
            if text.startswith(spelled):
                return num_kept, spelled
        return 0, ""


def check_message_type(messages: Messages, message_type: MessageType) -> None:
    """Raise `ConfigError` unless chat has a list of messages and completion has a string."""
    if message_type not in ("chat", "completion"):
        raise ConfigError(f"message_type is {message_type!r}; it is 'chat' or 'completion'.")
    if isinstance(messages, str) != (message_type == "completion"):
        kind = "a string" if isinstance(messages, str) else "a list of messages"
        raise ConfigError(
            f"message_type is {message_type!r} but the prompt is {kind}, so it is unclear what to "
            "send. Chat takes a list of messages, completion takes a string."
        )


def check_sampled(
    ids: IntArray,
    logprobs: Sequence[float] | FloatArray | None,
    versions: int | Sequence[int] | IntArray,
) -> tuple[FloatArray | None, IntArray]:
    """Return logprobs (float32 `[_C]`) and versions (int32 `[_C]`) that fit `ids` (int32 `[_C]`).

    Raises:
        TokenError: lengths differ, an id is negative, or a logprob is NaN or above 0.
    """
    if len(ids) and int(ids.min()) < 0:
        raise TokenError(f"a sampled token id is negative ({int(ids.min())}); ids start at 0.")
    per_token = (
        np.full(len(ids), versions, np.int32)
        if isinstance(versions, int)
        else np.array(versions, np.int32)
    )
    if len(per_token) != len(ids):
        raise TokenError(
            f"{len(ids)} sampled tokens came with {len(per_token)} policy versions; staleness "
            "would be counted wrongly. The engine must give one version per token."
        )
    if logprobs is None:
        return None, per_token
    return checked_logprobs(logprobs, len(ids)), per_token
