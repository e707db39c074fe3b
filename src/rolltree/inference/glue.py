"""Template glue: the text that a chat template puts between a sampled answer and the next one.

The glue (assistant close, new messages, next opener) is found by rendering a short probe
conversation whose assistant message is a sentinel, and cutting the result behind the sentinel. So
its cost is that of the new messages, whatever the length of the history. For each shape of
continuation (roles of the new messages, tools, kind of assistant message) the cut is checked once:
it must not depend on what came before, nothing of the new messages may be missing, and its tokens
must be the ones the tokenizer gives in context.

It knows templates and tokenizers. It knows nothing about engines or sessions, and it leaves out
what to do when the glue cannot be found: `GlueError` says why, the caller renders everything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rolltree.errors import RolltreeError
from rolltree.inference.template import ChatTemplate, TemplateError, for_template
from rolltree.inference.vocabulary import Vocabulary
from rolltree.types import ChatMessage, ToolSchema

SENTINEL = "Qz7AnchorZq"
_PROBE: list[ChatMessage] = [{"role": "user", "content": "Probe."}]
_LONG_PROBE: list[ChatMessage] = [
    {"role": "user", "content": "Earlier."},
    {"role": "assistant", "content": "Before."},
    {"role": "user", "content": "Probe."},
]


class GlueError(RolltreeError):
    """This template's continuation cannot be cut out and verified; the message says why."""


class Glue:
    """What one template puts between turns, learned on first use and remembered.

    `opener` is what `add_generation_prompt` adds. `close_id` is the token with which the template
    closes an assistant message (None: it uses none), `end_ids` are all tokens that end a turn.
    """

    def __init__(
        self, template: ChatTemplate, vocabulary: Vocabulary, end_ids: Sequence[int] = ()
    ) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._verified: dict[tuple[object, ...], str | None] = {}
        self.opener = self._learn_opener()
        self.close_id = self._learn_close()
        known = [*end_ids, *vocabulary.end_ids]
        if self.close_id is not None:
            known.insert(0, self.close_id)
        self.end_ids = tuple(dict.fromkeys(known))
        self._end_texts = tuple(vocabulary.decode([token]) for token in self.end_ids)

    def suffix(
        self,
        assistant: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> str:
        """Return the text from the assistant's close to the next opener.

        It starts with the closing token's text where the template has one.

        Raises:
            GlueError: the template gives no verifiable cut for this continuation.
        """
        calls = bool(assistant.get("tool_calls"))
        shape = (calls, bool(tools), *(_shape(message) for message in new_messages))
        stand_in = _stand_in(assistant)
        text = self._cut(_PROBE, stand_in, new_messages, tools)
        if shape not in self._verified:
            self._verified[shape] = self._verify(text, stand_in, new_messages, tools)
        problem = self._verified[shape]
        if problem is not None:
            raise GlueError(problem)
        return text

    def _cut(
        self,
        context: list[ChatMessage],
        stand_in: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> str:
        try:
            text = self._template.render([*context, stand_in, *new_messages], tools)
        except TemplateError as error:
            raise GlueError(f"the template refuses the probe conversation ({error})") from error
        if text.count(SENTINEL) != 1:
            raise GlueError(
                f"the template shows an earlier assistant message {text.count(SENTINEL)} times"
            )
        tail = text[text.index(SENTINEL) + len(SENTINEL) :]
        if not stand_in.get("tool_calls"):
            return tail
        ends = [tail.find(end) for end in self._end_texts]
        if not any(end >= 0 for end in ends):
            raise GlueError("no end token closes an assistant message with tool calls")
        return tail[min(end for end in ends if end >= 0) :]

    def _verify(
        self,
        text: str,
        stand_in: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> str | None:
        """Return why the cut `text` cannot be used, or None."""
        try:
            after_more = self._cut(_LONG_PROBE, stand_in, new_messages, tools)
        except GlueError as error:
            return str(error)
        if after_more != text:
            return "what the template writes for new messages depends on the earlier ones"
        for message in new_messages:
            content = for_template(message).get("content")
            if isinstance(content, str) and message.get("role") != "assistant":
                shown = (content.strip(), json.dumps(content.strip(), ensure_ascii=False)[1:-1])
                if not any(form in text for form in shown):
                    return f"the template changes or drops a new {message.get('role')} message"
        encode = self._vocabulary.encode
        ids = encode(text)
        whole = encode(self._template.render([*_PROBE, stand_in, *new_messages], tools))
        if len(ids) and list(whole[len(whole) - len(ids) :]) != list(ids):
            return "the tokenizer splits the new text differently inside the conversation"
        return None

    def _learn_opener(self) -> str:
        try:
            closed = self._template.render(_PROBE, add_generation_prompt=False)
            opened = self._template.render(_PROBE)
        except TemplateError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _learn_close(self) -> int | None:
        answer: ChatMessage = {"role": "assistant", "content": SENTINEL}
        try:
            text = self._template.render([*_PROBE, answer, *_PROBE], add_generation_prompt=False)
        except TemplateError:
            return None
        ids = self._vocabulary.encode(text[text.rfind(SENTINEL) + len(SENTINEL) :])
        return int(ids[0]) if len(ids) and self._vocabulary.is_special(int(ids[0])) else None


def _shape(message: ChatMessage) -> tuple[object, bool]:
    return (message.get("role"), bool(message.get("tool_calls")))


def _stand_in(assistant: ChatMessage) -> ChatMessage:
    """Return a probe message with the sentinel where the assistant's own text would end."""
    calls = assistant.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": SENTINEL}
    probes = [
        {
            "id": call.get("id", "call_0"),
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": {"probe": "x"}},
        }
        for call in calls
    ]
    probes[-1]["function"]["arguments"] = {"probe": SENTINEL}
    return {"role": "assistant", "content": "", "tool_calls": probes}
