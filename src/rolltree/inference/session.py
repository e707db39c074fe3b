"""Sessions that render prompts locally: messages to exact ids, sampled ids to a record.

`TokenSession.prepare` returns the ids to send, and `TokenSession.complete` turns the sampled ids
into a `ModelResponse` in the session's token tree. A prompt that continues an earlier call consists
of that call's exact ids and the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltree.inference.call import Answer, CallTree, record_of
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.message_index import MessageIndex
from rolltree.inference.request_fields import PLAIN, Rendering, split_rendering
from rolltree.tokens.buffers import as_ids
from rolltree.values.errors import ConfigError
from rolltree.values.types import (
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    ToolSchema,
)

if TYPE_CHECKING:
    from rolltree.inference.call import ModelCall


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids to send, int32 `[_P]`, and how they came about.

    `extends` is the `call_id` of the call that they continue exactly. If the history
    begins with the messages of a call that they do not continue, `reason` says why.
    """

    ids: IntArray
    extends: int | None = None
    reason: str | None = None
    messages: Messages = ""
    tools: Sequence[ToolSchema] | None = None
    model: str | None = None
    rendering: Rendering = PLAIN

    @property
    def begun(self) -> str:
        """The beginning of the answer, if the prompt has one."""
        if not self.rendering.continues or isinstance(self.messages, str):
            return ""
        return str(self.messages[-1]["content"])


class TokenSession:
    """The calls of one rollout, for a client that sends token ids.

    One object serves one rollout, with any number of agents and branches in it. `prepare` and
    `complete` are not thread-safe; calls that overlap in one event loop are fine.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._calls = CallTree()
        self._index = MessageIndex()
        self._texts: list[_Text] = []

    def prepare_call(self, call: ModelCall) -> tuple[Prompt, ModelCall]:
        """Return a call's prompt, and the call without the settings that say how it is rendered.

        Raises as `prepare` does, and `UnsupportedSetting` for such a setting.
        """
        assert not isinstance(call.prompt, np.ndarray)
        rendering, sampling = split_rendering(call.sampling)
        if rendering != PLAIN:
            from rolltree.inference.rendering import check_rendering

            check_rendering(rendering, sampling, call.message_type)
        own = {"message_type": call.message_type, "model": call.model, "rendering": rendering}
        prompt = self.prepare(call.prompt, call.tools, **own)  # type: ignore[arg-type]
        return prompt, call if sampling is call.sampling else replace(call, sampling=sampling)

    def renderer_of(self, prompt: Prompt) -> ChatRenderer:
        """Return the renderer of a prompt."""
        return self.renderer.with_variables(prompt.rendering.variables)

    def prepare(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None = None,
        *,
        message_type: MessageType = "chat",
        model: str | None = None,
        rendering: Rendering = PLAIN,
    ) -> Prompt:
        """Return the prompt for `messages` (a string when `message_type` is "completion").

        Raises:
            TemplateError: the template rejects these messages.
            ConfigError: messages and `message_type` do not match.
        """
        check_message_type(messages, message_type)
        if isinstance(messages, str):
            return self._prepare_text(messages, model)
        messages = list(messages)  # the caller may append to its list while the engine samples
        renderer = self.renderer.with_variables(rendering.variables)
        match = self._index.find(messages, tools, model)
        if match is not None and match.num_old == len(messages) and rendering.continues:
            from rolltree.inference.rendering import ends_with

            known = self._calls.path(match.call)
            if ends_with(renderer, known, messages[-1]):
                return Prompt(known, match.call, None, messages, tools, model, rendering)
            match = self._index.find(messages[:-1], tools, model)
        if match is None:
            if rendering.continues:
                ids = renderer.vocabulary.encode_start(renderer.begun_text(messages, tools))
            else:
                ids = renderer.render(messages, tools)
            return Prompt(ids, None, None, messages, tools, model, rendering)
        # The exact ids, sampled ones included: nothing is tokenized again.
        known = self._calls.path(match.call)
        found = renderer.continuation(
            known, messages, match.num_old, tools, continues=rendering.continues
        )
        if found.suffix is not None:
            ids = np.concatenate((known, found.suffix))
            return Prompt(ids, match.call, None, messages, tools, model, rendering)
        assert found.rendered is not None
        return Prompt(found.rendered, None, found.reason, messages, tools, model, rendering)

    def complete(self, prompt: Prompt, answer: Answer, call: ModelCall) -> ModelResponse:
        """Return the record of what was sampled after `prompt`; later prompts can continue it.

        An answer without ids is recorded, but no prompt continues it. The answer's text, if it has
        one, is used instead of the decoded ids, which may contain a stop string.

        Raises:
            TokenError: the arrays contradict each other.
        """
        if answer.completion_ids is not None:
            answer.completion_ids = as_ids(answer.completion_ids, "completion_ids")
        ids = answer.completion_ids
        if answer.text is None:
            answer.text = "" if ids is None else self.renderer.decode_answer(ids)
        self._read_message(prompt, answer)
        if prompt.reason:
            answer.info = {**answer.info, "rerendered": prompt.reason}
        if not isinstance(prompt.messages, str) and (
            notes := self.renderer_of(prompt).notes(prompt.messages, prompt.tools)
        ):
            answer.info = {**answer.info, "notes": notes}
        if prompt.rendering != PLAIN:
            answer.info = {**answer.info, "rendering": prompt.rendering._asdict()}
        answer.num_prompt_tokens = len(prompt.ids)
        # Without ids there is no path: such a call can be evaluated but not trained.
        if ids is None:
            return record_of(answer, call)
        answer.prompt_ids, answer.num_completion_tokens = prompt.ids, len(ids)
        response = self._calls.record(answer, call, prompt.extends)
        self._keep(prompt, response)
        return response

    def remember(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        response: ModelResponse,
    ) -> ModelResponse:
        """Record a call that was made elsewhere; later prompts can continue it.

        Its ids must be this model's: if the first prompt of the conversation has other ids here,
        nothing is recorded, and the response is returned without ids.
        """
        prompt_ids = response.prompt_ids
        if prompt_ids is None or response.completion_ids is None:
            return response
        extends, is_ours = None, False
        rendering = Rendering(**response.info.get("rendering", {}))
        if isinstance(messages, str):
            is_ours = np.array_equal(self._prepare_text(messages, model).ids, prompt_ids)
        else:
            match = self._index.find(messages, tools, model)
            # The first prompt of a conversation proves that its ids are this model's; later calls
            # continue it.
            if match is None:
                own = self.prepare(messages, tools, model=model, rendering=rendering)
                is_ours = np.array_equal(own.ids, prompt_ids)
            else:
                is_ours, earlier = True, self._calls.path(match.call)
                if np.array_equal(prompt_ids[: len(earlier)], earlier):
                    extends = match.call
        if not is_ours:
            return without_ids(response)
        made = self._calls.adopt(response, extends)
        self._keep(Prompt(prompt_ids, extends, None, messages, tools, model, rendering), made)
        return made

    def _keep(self, prompt: Prompt, response: ModelResponse) -> None:
        """Let later prompts continue a call."""
        assert response.completion_ids is not None
        if isinstance(prompt.messages, str):
            # A string is matched by its text, which may cover fewer tokens than were sampled.
            num_kept, kept_text = self._spelled_out(response.completion_ids, response.text)
            size, call_id = len(prompt.ids) + num_kept, response.call_id
            self._texts.append(_Text(prompt.model, prompt.messages + kept_text, call_id, size))
        else:
            messages, message, call_id = prompt.messages, response.message, response.call_id
            if prompt.rendering.continues:
                # In later prompts both are one message.
                said = f"{prompt.begun}{message.get('content') or ''}"
                messages, message = messages[:-1], {**message, "content": said}
            self._index.add(messages, message, call_id, prompt.tools, prompt.model)

    def _read_message(self, prompt: Prompt, answer: Answer) -> None:
        """Set the answer's message and its finish reason, which may become tool calls."""
        assert answer.text is not None
        if isinstance(prompt.messages, str):
            answer.message = {"role": "assistant", "content": answer.text}
            return
        parsed = self.renderer_of(prompt).parse_text(
            answer.text, answer.finish_reason, prompt.tools, answer.completion_ids, prompt.begun
        )
        answer.message, answer.finish_reason = parsed.message, parsed.finish_reason

    def _prepare_text(self, text: str, model: str | None) -> Prompt:
        best: _Text | None = None
        for entry in self._texts:
            # `>=` takes the latest of equal texts.
            longer = best is None or len(entry.text) >= len(best.text)
            if longer and entry.model == model and text.startswith(entry.text):
                best = entry
        if best is None:
            return Prompt(self.renderer.encode_text(text), None, None, text, None, model)
        path = self._calls.path(best.call_id)
        new = self.renderer.encode_text(text[len(best.text) :], start=False)
        ids = np.concatenate((path[: best.num_tokens], new))
        # A prompt that leaves sampled tokens out is a different path.
        exact = np.array_equal(ids[: len(path)], path)
        reason = None if exact else "the string leaves out tokens that were sampled at the end"
        return Prompt(ids, best.call_id if exact else None, reason, text, None, model)

    def _spelled_out(self, ids: IntArray, text: str) -> tuple[int, str]:
        """Return how many of the first `ids` the `text` begins with, and their text.

        End tokens and stop strings are sampled but are not part of the text.
        """
        # From the end, since only one token or a few are missing from the text.
        for num_kept in range(len(ids), 0, -1):
            spelled = self.renderer.decode(ids[:num_kept])
            if text.startswith(spelled):
                return num_kept, spelled
        return 0, ""


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt string with its answer: the text of the first `num_tokens` of a call's path."""

    model: str | None
    text: str
    call_id: int
    num_tokens: int


def without_ids(response: ModelResponse) -> ModelResponse:
    """Return a response as a server that reports no ids would give it."""
    return replace(
        response,
        prompt_ids=None,
        completion_ids=None,
        logprobs=None,
        versions=None,
        extends=None,
        routed_experts=None,
    )


def num_characters(messages: Messages) -> int:
    """Return how many characters of text the contents of `messages` have, or the string itself."""
    if isinstance(messages, str):
        return len(messages)
    size = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        size += sum(len(text) for text in texts if isinstance(text, str))
    return size


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
