"""Template glue: the text that a chat template puts between a sampled answer and the next one.

The glue (assistant close, new messages, next opener) is found by rendering a short probe
conversation whose assistant message is a sentinel, and cutting the result behind the sentinel. So
its cost is that of the new messages, whatever the length of the history. For each shape of
continuation (roles of the new messages, tools, kind of assistant message) the cut is checked once:
it must not depend on what came before, and its tokens must be the ones that the tokenizer gives in
context.

It knows templates and tokenizers. It knows nothing about engines or sessions, and it leaves out
what to do when the glue cannot be found: `GlueError` says why, the caller renders everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltree.errors import RolltreeError
from rolltree.inference.ends import PROBE, SENTINEL, TurnEnds, learn_ends, render, stand_in
from rolltree.inference.template import ChatTemplate, TemplateError
from rolltree.inference.vocabulary import Vocabulary
from rolltree.types import ChatMessage, IntArray, ToolSchema

_LONG_PROBE: list[ChatMessage] = [
    {"role": "user", "content": "Earlier."},
    {"role": "assistant", "content": "Before."},
    *PROBE,
]


class GlueError(RolltreeError):
    """This template's continuation cannot be cut out and verified; the message says why."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What checking one shape of continuation found; `problem` is None when the cut is sound."""

    show_tools: bool
    problem: str | None


class Glue:
    """What one template puts between turns, learned on first use and remembered."""

    def __init__(
        self, template: ChatTemplate, vocabulary: Vocabulary, end_ids: Sequence[int] = ()
    ) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self.ends: TurnEnds = learn_ends(template, vocabulary, end_ids)
        self._end_texts = tuple(vocabulary.decode([token]) for token in self.ends.end_ids)
        self._verdicts: dict[tuple[object, ...], _Verdict] = {}

    def suffix(
        self,
        last_id: int | None,
        assistant: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
    ) -> tuple[IntArray, str]:
        """Return what follows sampled ids that end with `last_id`: ids (int32 `[_T]`) and text.

        The template's closing token is left out where the sampled ids end with it, or with another
        end token in its place.

        Raises:
            GlueError: the template gives no verifiable cut for this continuation.
        """
        probe = stand_in(assistant)
        shape = ("tool_calls" in probe, bool(tools), *map(_shape, new_messages))
        if shape not in self._verdicts:
            self._verdicts[shape] = self._verify(probe, new_messages, tools)
        verdict = self._verdicts[shape]
        if verdict.problem is not None:
            raise GlueError(verdict.problem)
        text = self._cut(PROBE, probe, new_messages, tools if verdict.show_tools else None)
        ids = self._vocabulary.encode(text)
        if last_id in self.ends.end_ids and len(ids):
            first = int(ids[0])
            if first == last_id or first in self.ends.close_ids:
                return ids[1:], text[len(self._vocabulary.decode([first])) :]
        return ids, text

    def _cut(
        self,
        context: list[ChatMessage],
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> str:
        """Return what the template writes from the close of `probe` to the next opener."""
        try:
            text = self._template.render([*context, probe, *new_messages], tools)
        except TemplateError as error:
            raise GlueError(f"the template refuses the probe conversation ({error})") from error
        if text.count(SENTINEL) != 1:
            raise GlueError(
                f"the template shows an earlier assistant message {text.count(SENTINEL)} times"
            )
        tail = text[text.index(SENTINEL) + len(SENTINEL) :]
        if "tool_calls" not in probe:
            return tail
        ends = [at for at in map(tail.find, self._end_texts) if at >= 0]
        if ends:
            return tail[min(ends) :]
        alone = render(self._template, [*context, probe], tools).rpartition(SENTINEL)[2]
        if not alone or not tail.startswith(alone):
            raise GlueError("the end of an assistant message with tool calls cannot be found")
        return tail[len(alone) :]

    def _verify(
        self,
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> _Verdict:
        show = self._shows_tools_first(probe, new_messages, tools)
        shown = tools if show else None
        try:
            text = self._cut(PROBE, probe, new_messages, shown)
            after_more = self._cut(_LONG_PROBE, probe, new_messages, shown)
        except GlueError as error:
            return _Verdict(show, str(error))
        if after_more != text:
            problem = "what the template writes for new messages depends on the earlier ones"
            return _Verdict(show, problem)
        ids = self._vocabulary.encode(text)
        whole = self._vocabulary.encode(
            self._template.render([*PROBE, probe, *new_messages], shown)
        )
        if whole[len(whole) - len(ids) :].tolist() != ids.tolist():
            problem = "the tokenizer splits the new text differently inside the conversation"
            return _Verdict(show, problem)
        return _Verdict(show, None)

    def _shows_tools_first(
        self,
        probe: ChatMessage,
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
    ) -> bool:
        """Whether tools keep their place: where they move to the newest message, as in Mistral's
        templates, they were already shown and are not shown again.
        """
        if not tools:
            return False
        first = render(self._template, PROBE, tools)
        return render(self._template, [*PROBE, probe, *new_messages], tools).startswith(first)


def _shape(message: ChatMessage) -> tuple[object, bool]:
    return (message.get("role"), bool(message.get("tool_calls")))
