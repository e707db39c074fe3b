"""The token side of a rollout: from messages to exact prompt ids, from sampled ids to a record.

`TokenSession.prepare` gives the ids to send, `TokenSession.complete` turns what was sampled into a
`ModelResponse` that lies in the session's token tree. A prompt that continues an earlier call is
that call's exact ids plus only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rolltree.errors import ConfigError
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.message_index import MessageIndex
from rolltree.tokens import TokenTree, routing_streams
from rolltree.tokens.buffers import as_ids
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
class Prompt:
    """Ids to send, int32 `[_P]`, and how they came about.

    `extends` is the `call_id` of the call that they continue exactly. `reason` says why they do not
    continue a call whose messages come first in the history, where that is so.
    """

    ids: IntArray
    extends: int | None = None
    reason: str | None = None
    messages: Messages = ""
    tools: Sequence[ToolSchema] | None = None
    model: str | None = None


class CallTree:
    """The token tree of one rollout's calls, and which of them is which `call_id`."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self._handles: dict[int, int] = {}

    def path(self, call_id: int) -> IntArray:
        """Return the prompt and completion of a call, int32 `[_P + _C]`, read-only."""
        return self.tree.path_view(self._handles[call_id])

    def insert(self, response: ModelResponse) -> ModelResponse:
        """Put a call into the tree and tell the response where it is. Returns the response.

        Raises:
            TokenError: the arrays contradict each other.
        """
        prompt, completion = response.prompt_ids, response.completion_ids
        assert prompt is not None
        assert completion is not None
        parent = None if response.extends is None else self._handles[response.extends]
        path_len = len(prompt) + len(completion)
        versions = 0 if response.versions is None else response.versions
        call = self.tree.insert(
            prompt,
            completion,
            logprobs=response.logprobs,
            temperature=response.temperature,
            versions=versions,
            parent=parent,
            streams=routing_streams(response.routed_experts, path_len, self.tree, parent, versions),
        )
        self._handles[response.call_id] = call
        return response.placed(self.tree, call)


class TokenSession:
    """The calls of one rollout, for a client that sends token ids.

    One object serves one rollout, with any number of agents and branches in it. `prepare` and
    `complete` are not to be called from several threads at once; calls that overlap in one event
    loop are fine.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._calls = CallTree()
        self._index = MessageIndex()
        self._texts: list[_Text] = []

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
        match = self._index.find(messages, tools, model)
        if match is None:
            ids = self.renderer.render(messages, tools)
            return Prompt(ids, None, None, messages, tools, model)
        known = self._calls.path(match.call)
        found = self.renderer.continuation(known, messages, match.num_old, tools)
        if found.suffix is not None:
            ids = np.concatenate((known, found.suffix))
            return Prompt(ids, match.call, None, messages, tools, model)
        assert found.rendered is not None
        return Prompt(found.rendered, None, found.reason, messages, tools, model)

    def complete(
        self,
        prompt: Prompt,
        ids: Sequence[int] | IntArray | None,
        logprobs: Sequence[float] | FloatArray | None,
        finish_reason: FinishReason,
        *,
        temperature: float,
        versions: int | Sequence[int] | IntArray = 0,
        text: str | None = None,
        **fields: Any,
    ) -> ModelResponse:
        """Return the record of what was sampled after `prompt`; later prompts can continue it.

        Args:
            prompt: what `prepare` returned.
            ids: int `[_C]`, the end token included where one was sampled; None if the engine
                gave none, which nothing can continue.
            logprobs: float `[_C]`, of the distribution sampled from; None when unknown.
            finish_reason: why sampling ended.
            temperature: the temperature sampled with.
            versions: policy version of every token, int `[_C]`, or one for all.
            text: the answer's text where it is not the decoded ids, as when a stop string, which is
                among the ids, is cut off.
            fields: further fields of `ModelResponse`: `id`, `model`, `raw`, `wait_s`, `info`.

        Raises:
            TokenError: the arrays contradict each other.
        """
        completion = None if ids is None else as_ids(np.asarray(ids), "completion_ids")
        if text is None:
            text = "" if completion is None else self.renderer.decode_answer(completion)
        message, finish_reason = self._message(prompt, text, finish_reason)
        if prompt.reason:
            fields["info"] = {**fields.get("info", {}), "rerendered": prompt.reason}
        fields |= {"message": message, "text": text, "finish_reason": finish_reason}
        fields |= {"temperature": temperature, "num_prompt_tokens": len(prompt.ids)}
        if completion is None:
            return ModelResponse(**fields)
        count = len(completion)
        whole = versions if not isinstance(versions, int) else np.full(count, versions, np.int32)
        response = self._calls.insert(
            ModelResponse(
                prompt_ids=prompt.ids,
                completion_ids=completion,
                logprobs=None if logprobs is None else np.array(logprobs, np.float32),
                versions=np.asarray(whole, np.int32),
                num_completion_tokens=count,
                extends=prompt.extends,
                **fields,
            )
        )
        self._keep(prompt, response)
        return response

    def remember(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        response: ModelResponse,
    ) -> ModelResponse:
        """Take in a call that was made elsewhere; later prompts continue it.

        Its ids must be this model's: a conversation whose first prompt has other ids here, or none,
        is taken in without, and what is returned has none either.
        """
        prompt_ids = response.prompt_ids
        if prompt_ids is None or response.completion_ids is None:
            return response
        extends, is_ours = None, False
        if isinstance(messages, str):
            is_ours = np.array_equal(self._prepare_text(messages, model).ids, prompt_ids)
        else:
            match = self._index.find(messages, tools, model)
            if match is None:
                is_ours = np.array_equal(self.renderer.render(messages, tools), prompt_ids)
            else:
                is_ours, earlier = True, self._calls.path(match.call)
                if np.array_equal(prompt_ids[: len(earlier)], earlier):
                    extends = match.call
        if not is_ours:
            return without_ids(response)
        made = self._calls.insert(replace(response, extends=extends))
        self._keep(Prompt(prompt_ids, extends, None, messages, tools, model), made)
        return made

    def _keep(self, prompt: Prompt, response: ModelResponse) -> None:
        """Let later prompts continue a call."""
        assert response.completion_ids is not None
        if isinstance(prompt.messages, str):
            num_kept, kept_text = self._spelled_out(response.completion_ids, response.text)
            size, call_id = len(prompt.ids) + num_kept, response.call_id
            self._texts.append(_Text(prompt.model, prompt.messages + kept_text, call_id, size))
        else:
            message, call_id = response.message, response.call_id
            self._index.add(prompt.messages, message, call_id, prompt.tools, prompt.model)

    def _message(
        self, prompt: Prompt, text: str, finish_reason: FinishReason
    ) -> tuple[ChatMessage, FinishReason]:
        if isinstance(prompt.messages, str):
            return {"role": "assistant", "content": text}, finish_reason
        parsed = self.renderer.parse_text(text, finish_reason, prompt.tools)
        return parsed.message, parsed.finish_reason

    def _prepare_text(self, text: str, model: str | None) -> Prompt:
        best: _Text | None = None
        for entry in self._texts:
            longer = best is None or len(entry.text) >= len(best.text)
            if longer and entry.model == model and text.startswith(entry.text):
                best = entry
        if best is None:
            return Prompt(self.renderer.encode_text(text), None, None, text, None, model)
        path = self._calls.path(best.call_id)
        new = self.renderer.encode_text(text[len(best.text) :], start=False)
        ids = np.concatenate((path[: best.num_tokens], new))
        exact = np.array_equal(ids[: len(path)], path)
        reason = None if exact else "the string leaves out tokens that were sampled at the end"
        return Prompt(ids, best.call_id if exact else None, reason, text, None, model)

    def _spelled_out(self, ids: IntArray, text: str) -> tuple[int, str]:
        """Return how many of `ids` the `text` spells out from its start, and that part of it.

        End tokens and stop strings are sampled but are not part of the text.
        """
        for num_kept in range(len(ids), 0, -1):
            spelled = self.renderer.decode(ids[:num_kept])
            if text.startswith(spelled):
                return num_kept, spelled
        return 0, ""


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt string with its answer, which the first `num_tokens` of a call's path spell."""

    model: str | None
    text: str
    call_id: int
    num_tokens: int


def without_ids(response: ModelResponse) -> ModelResponse:
    """Return a response as a server gives it that reports no ids."""
    return replace(
        response,
        prompt_ids=None,
        completion_ids=None,
        logprobs=None,
        versions=None,
        extends=None,
        routed_experts=None,
    )


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
