"""Finds what a chat template writes between a sampled answer and the next one.

That is the assistant's close, the new messages and the next opener. `Glue` renders a short probe
conversation whose assistant message is a sentinel, and cuts the result after it, so the cost
depends on the new messages, not on the history. For each shape of continuation (roles of the new
messages, tools, kind of assistant message) the cut is checked once: it must show every new message,
and its tokens must be the ones that the tokenizer gives in context. If it depends on what came
before, the conversation itself is the probe. If no such cut exists, `GlueError` says why and the
caller renders everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rolltree.inference.template import ChatTemplate, TemplateError
from rolltree.inference.turn_tokens import (
    CALLER,
    PROBE,
    SENTINEL,
    TOOL,
    TurnTokens,
    render,
    stand_in,
)
from rolltree.inference.vocabulary import Vocabulary
from rolltree.values.errors import RolltreeError
from rolltree.values.types import ChatMessage, IntArray, ToolSchema

_LONG_PROBE: list[ChatMessage] = [
    {"role": "user", "content": "Earlier."},
    {"role": "assistant", "content": "Before."},
    *PROBE,
]
# Some templates count the calls of a conversation.
_LONG_CALLS: list[ChatMessage] = [*PROBE, CALLER, TOOL, *_LONG_PROBE[1:]]
_DEPENDS = "what the template writes for new messages depends on the earlier ones"


class GlueError(RolltreeError):
    """This template's continuation cannot be cut out and verified; the message says why."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The check of one shape of continuation; `problem` is None if the cut is sound."""

    show_tools: bool
    problem: str | None


class Glue:
    """The text that one `template` puts between turns, learned on first use and cached."""

    def __init__(
        self, template: ChatTemplate, vocabulary: Vocabulary, turn_tokens: TurnTokens
    ) -> None:
        self.template, self.turn_tokens = template, turn_tokens
        self._vocabulary = vocabulary
        self._end_texts = tuple(vocabulary.decode([token]) for token in self.turn_tokens.end_ids)
        self._verdicts: dict[tuple[object, ...], _Verdict] = {}

    def suffix(
        self,
        last_id: int | None,
        assistant: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        before: Sequence[ChatMessage] = PROBE,
        *,
        opener: bool = True,
    ) -> tuple[IntArray, str]:
        """Return the ids (int32 `[_T]`) and text to append to sampled ids that end with `last_id`.

        The template's closing token is left out if the sampled ids end with it, or with another
        end token in its place. `before` are the messages before the `assistant`, which are rendered
        only if the new text depends on them. `opener`: open the next answer's turn at the end.

        Raises:
            GlueError: the template gives no verifiable cut for this continuation.
        """
        probe = stand_in(assistant)
        calls = probe.get("tool_calls") or ()
        # What the template writes after the last call is the same, and all were sampled already.
        if len(calls) > 1 and self._takes_one_call:
            probe = {**probe, "tool_calls": calls[-1:]}
        # The text between turns depends on the kinds of messages; their contents are inserted
        # unchanged.
        shape = ("tool_calls" in probe, bool(tools), opener, *map(_shape, new_messages))
        if shape not in self._verdicts:
            self._verdicts[shape] = self._verify(probe, new_messages, tools, opener)
        verdict = self._verdicts[shape]
        shown = tools if verdict.show_tools else None
        context: Sequence[ChatMessage] = PROBE
        if verdict.problem == _DEPENDS:
            context, shown = before, tools
        elif verdict.problem is not None:
            raise GlueError(verdict.problem)
        text = self._cut(context, probe, new_messages, shown, opener)
        ids = self._vocabulary.encode(text)
        num_closed = self._num_closed(last_id, ids)
        # The sampled ids ended the turn; the template's own close would be a second one.
        if num_closed:
            close = self._vocabulary.decode([int(ids[num_closed - 1])])
            return ids[num_closed:], text.partition(close)[2]
        return ids, text

    @cached_property
    def _takes_one_call(self) -> bool:
        """Whether the template refuses a message with several calls, as Llama 3.1's does."""
        one, several = (
            {**CALLER, "tool_calls": number * CALLER["tool_calls"]} for number in (1, 2)
        )
        takes_one, takes_two = (
            bool(render(self.template, [*PROBE, stand_in(caller)])) for caller in (one, several)
        )
        return takes_one and not takes_two

    def _num_closed(self, last_id: int | None, ids: IntArray) -> int:
        """Return how many of the template's `ids` close a turn that `last_id` ended already."""
        turn = self.turn_tokens
        if last_id in turn.end_ids:
            for index, token in enumerate(ids.tolist()):
                if token == last_id or token in turn.close_ids:
                    return index + 1
                # Past the close, and not white space: the next message has begun.
                if index >= turn.num_close and self._vocabulary.decode([token]).strip():
                    break
        return 0

    def _cut(
        self,
        context: Sequence[ChatMessage],
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        opener: bool,
    ) -> str:
        """Return what the template writes from the close of `probe` to the next opener."""
        try:
            text = self.template.render_history(
                [*context, probe, *new_messages], tools, add_generation_prompt=opener
            )
        except TemplateError as error:
            raise GlueError(f"the template rejects the probe conversation ({error})") from error
        if text.count(SENTINEL) != 1:
            raise GlueError(
                f"the template shows an earlier assistant message {text.count(SENTINEL)} times"
            )
        tail = text[text.index(SENTINEL) + len(SENTINEL) :]
        if "tool_calls" not in probe:
            return tail
        # After the sentinel come the brackets and tags that close the call, which the model has
        # sampled.
        ends = [at for at in map(tail.find, self._end_texts) if at >= 0]
        if ends:
            return tail[min(ends) :]
        try:
            alone = self.template.render_history(
                [*context, probe], tools, add_generation_prompt=False
            ).rpartition(SENTINEL)[2]
        except TemplateError:
            alone = ""
        if not alone or not tail.startswith(alone):
            raise GlueError("the end of an assistant message with tool calls cannot be found")
        return tail[len(alone) :]

    def _verify(
        self,
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        opener: bool,
    ) -> _Verdict:
        show = self._shows_tools_first(probe, new_messages, tools)
        shown = tools if show else None
        try:
            text = self._cut(PROBE, probe, new_messages, shown, opener)
            # A template may write a message differently in a longer conversation.
            longer = _LONG_CALLS if "tool_calls" in probe else _LONG_PROBE
            after_more = self._cut(longer, probe, new_messages, shown, opener)
        except GlueError as error:
            return _Verdict(show, str(error))
        hidden = self._hidden(probe, new_messages, shown, opener)
        if hidden is not None:
            return _Verdict(show, hidden)
        depends = after_more != text
        ids = self._vocabulary.encode(text)
        # A tokenizer may join the end of the answer with the beginning of what follows.
        rendered = self.template.render_history(
            [*PROBE, probe, *new_messages], shown, add_generation_prompt=opener
        )
        whole = self._vocabulary.encode(rendered)
        if whole[len(whole) - len(ids) :].tolist() != ids.tolist():
            problem = "the tokenizer splits the new text differently inside the conversation"
            return _Verdict(show, problem)
        return _Verdict(show, _DEPENDS if depends else None)

    def _hidden(
        self,
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        opener: bool,
    ) -> str | None:
        """Return what is wrong if a new message is not rendered in its place, or None.

        Some templates collect system text at the start of the prompt, and some leave out roles that
        they do not know.
        """
        # Not the sentinel itself, which marks the cut.
        markers = [f"{SENTINEL[::-1]}{index}x" for index in range(len(new_messages))]
        marked = [_marked(*pair) for pair in zip(new_messages, markers, strict=True)]
        try:
            text = self._cut(PROBE, probe, marked, tools, opener)
        except GlueError as error:
            return str(error)
        for message, marker in zip(new_messages, markers, strict=True):
            if marker not in text:
                whole = render(self.template, [*PROBE, probe, *marked], tools)
                does = "moves" if marker in whole else "leaves out"
                return f"the template {does} a new {message.get('role')} message"
        return None

    def _shows_tools_first(
        self,
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> bool:
        """Whether tools keep their place. If they move to the newest message, as in Mistral's
        templates, they have been shown already and are not shown again.
        """
        if not tools:
            return False
        first = render(self.template, PROBE, tools)
        return render(self.template, [*PROBE, probe, *new_messages], tools).startswith(first)


def _marked(message: ChatMessage, marker: str) -> ChatMessage:
    """Return a message of the same shape with `marker` as its text."""
    marked = {**message, "content": marker}
    if message.get("tool_calls"):
        last = message["tool_calls"][-1]
        call = {**last, "function": {**last["function"], "arguments": {"probe": marker}}}
        marked["tool_calls"] = [*message["tool_calls"][:-1], call]
    return marked


def _shape(message: ChatMessage) -> tuple[object, bool]:
    return (message.get("role"), bool(message.get("tool_calls")))
