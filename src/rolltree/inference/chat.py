"""Turns messages into prompt ids and completion ids into messages, for one chat template.

The first prompt of a conversation is the rendered template. Each later one is the exact ids of the
previous prompt and completion plus only what is new, so sampled text is not tokenized again. If the
template does not allow that, the whole prompt is rendered again (`Continuation.reason`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rolltree._helpers.untrusted import well_formed
from rolltree.inference.formats.reader import CompletionParser, ParsedCompletion, cut_at_stop
from rolltree.inference.formats.rows import ReasoningFormat, ToolFormat, tool_format
from rolltree.inference.template import ChatTemplate, TemplateError
from rolltree.inference.turn_tokens import PROBE, learn_turn_tokens
from rolltree.inference.vocabulary import BOUNDARY, Tokenizer, Vocabulary
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import ChatMessage, FinishReason, IntArray, SamplingParams, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.formats.machine import Reading
    from rolltree.inference.glue import Glue

logger = logging.getLogger("rolltree.inference")
History = Literal["keep", "template"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a prompt continues an earlier call.

    With `suffix` (int32 `[_T]`, the new ids alone) the prompt is the earlier call's prompt and
    completion followed by it. Without it, the whole prompt is re-rendered as `rendered`, and
    `reason` says why.
    """

    suffix: IntArray | None
    rendered: IntArray | None = None
    reason: str | None = None


class ChatRenderer:
    """Renders prompts and reads completions for one tokenizer.

    If the template refuses something that a model may write, such as two calls in one message, the
    history is rendered in the mildest form that it takes (`rolltree.inference.other_forms`).

    Args:
        tokenizer: anything with `encode` and `decode`, such as a transformers fast tokenizer.
        template: the chat template's text, or several by name; None takes the tokenizer's.
        history: what happens if the template rewrites earlier turns (say, strips reasoning):
            `"keep"` continues the exact ids, `"template"` follows the template, which breaks the
            prefix there and costs O(history) per turn.
        variables: extra names for the template, such as `{"enable_thinking": False}`.
        tool_parser: the format of tool calls: a name in `TOOL_PARSERS`, `"auto"` (detected in the
            template), `"none"`, or a `ToolFormat` of your own.
        reasoning: the format of reasoning: a name in `REASONING_TAGS`, `"auto"`, `"none"`, or a
            `ReasoningFormat`.
        end_ids: token ids that end a turn, in addition to the tokenizer's and the template's.
        control_in_messages: whether control tokens that a message spells out ("<|im_end|>") become
            those tokens. Otherwise they are text, so that only the template and the model
            can end or begin a turn. Assistant messages are left as they are.

    A tokenizer without a template suffices for text completions; messages then raise `ConfigError`.

    Raises:
        ConfigError: an argument has an unknown value.
        TemplateError: the template does not compile, or does not terminate.

    Example:
        >>> renderer = ChatRenderer(ByteTokenizer())                            # doctest: +SKIP
        >>> renderer.render([{"role": "user", "content": "7 + 5 ="}])           # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | Mapping[str, str] | None = None,
        *,
        history: History = "keep",
        variables: Mapping[str, Any] | None = None,
        tool_parser: str | ToolFormat = "auto",
        reasoning: str | ReasoningFormat = "auto",
        end_ids: Sequence[int] = (),
        control_in_messages: bool = False,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "tokenizer")}
        if history not in ("keep", "template"):
            raise ConfigError(
                f"unknown history mode {history!r}." + did_you_mean(history, ("keep", "template"))
            )
        self.history: History = history
        self._arguments = arguments
        self._others: dict[str, ChatRenderer] = {}
        self.asked_names: tuple[str, ...] = ()
        """Names of `chat_template_kwargs`; see `with_variables`."""
        self.control_in_messages = control_in_messages
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        names = {**self.vocabulary.variables, **(variables or {})}
        sources = _sources(tokenizer, template)
        # The template with tools contains the marks of tool calls, which identify the parser.
        shows_calls = sources.get("tool_use") or sources.get("default") or ""
        row = tool_format(tool_parser, shows_calls)
        # Those of gpt-oss end the turn, too.
        marks = () if row.grammar == "harmony" else row.marks
        of_calls = self.vocabulary.ids_of(marks)
        self._templates = {kind: ChatTemplate(source, names) for kind, source in sources.items()}
        self._turns = {
            kind: learn_turn_tokens(each, self.vocabulary, end_ids, of_calls)
            for kind, each in self._templates.items()
        }
        self._glues: dict[str, Glue] = {}
        known = [end for turn in self._turns.values() for end in turn.end_ids]
        self.end_ids = tuple(dict.fromkeys((*known, *end_ids, *self.vocabulary.end_ids)))
        """Token ids that end a turn: an engine stops after sampling one of them."""
        default = self._turns.get("tool_use") or self._turns.get("default")
        self._parser = CompletionParser(
            shows_calls,
            tool_parser=tool_parser,
            reasoning=reasoning,
            start=default.start if default else "",
            ids_of=self.vocabulary.ids_of,
            respond=(
                getattr(tokenizer, "parse_response", None)
                if getattr(tokenizer, "response_template", None) and template is None
                else None
            ),
        )
        if reasoning == "auto" and self.formats[1] == "none" and "reasoning_content" in shows_calls:
            logger.warning(
                "the chat template has reasoning, but marks that no format knows: reasoning stays "
                "in the content. Name it with reasoning=, or give a ReasoningFormat (docs/tools.md)"
            )

    def with_variables(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer with further names for the template; the same one if there are none.

        Raises:
            TemplateError: the template fails with them.
        """
        if not variables:
            return self
        from rolltree.inference.rendering import other_renderer

        return other_renderer(self, self._arguments, self._others, variables)

    def _kind(self, tools: Sequence[ToolSchema] | None) -> str:
        """Return which template is that of calls with or without tools.

        Raises:
            ConfigError: there is no template.
        """
        if not self._templates:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot become a prompt. Pass "
                "template=..., or use message_type='completion' with a base model."
            )
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _glue(self, tools: Sequence[ToolSchema] | None) -> Glue:
        """Return what continues prompts with or without tools."""
        from rolltree.inference.glue import Glue

        kind = self._kind(tools)
        if kind not in self._glues:
            self._glues[kind] = Glue(self._templates[kind], self.vocabulary, self._turns[kind])
        return self._glues[kind]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        """Return the prompt of a whole conversation, int32 `[_T]`.

        Raises:
            TemplateError: the template rejects these messages.
        """
        text = self.text(messages, tools, add_generation_prompt=add_generation_prompt)
        return self.vocabulary.encode_start(text)

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a prompt; raises as `render`."""
        return self._templates[self._kind(tools)].render_history(
            self._as_text(messages), tools, add_generation_prompt=add_generation_prompt
        )

    def notes(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None = None
    ) -> dict[str, str]:
        """Return what of a conversation its prompt shows in another way than asked, by its name."""
        template = self._templates[self._kind(tools)]
        unread = [name for name in self.asked_names if name not in template.source]
        why = "the chat template reads no such name"
        shown = template.notes(messages, tools)
        return shown | {f"chat_template_kwargs.{name}": why for name in unread}

    def begun_text(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """Return the text of a prompt that ends with the final message, inside its turn.

        Raises:
            TemplateError: the template rejects these messages, or does not show the final one.
            UnsupportedSetting: the final message is not an assistant's text.
        """
        from rolltree.inference.rendering import begun, until_mark

        return until_mark(self.text(begun(messages), tools, add_generation_prompt=False))

    def _as_text(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return the messages changed so that control tokens in them are encoded as text."""
        if self.control_in_messages:
            return messages
        plain = self.vocabulary.without_control
        return [_with_content(message, plain) for message in messages]

    @property
    def reads_calls(self) -> bool:
        """Whether the format of this model's calls is known, or was chosen to be none."""
        return self._parser.reads_calls

    @property
    def formats(self) -> tuple[str, str]:
        """The names of the formats of tool calls and of reasoning that answers are read in."""
        if self._parser.respond is not None:
            return "response_template", "response_template"
        return self._parser.tool_parser, self._parser.reasoning

    @property
    def parser(self) -> CompletionParser:
        """What reads answers."""
        return self._parser

    def shows_tools(self, tools: Sequence[ToolSchema]) -> bool:
        """Whether the template names any of the tools in a prompt; True if it rejects the probe."""
        template = self._templates[self._kind(tools)]
        try:
            text, bare = template.render(PROBE, tools), template.render(PROBE)
        except TemplateError:
            return True
        # A name such as "now" or "search" may be a word of the template itself.
        names = [tool["function"]["name"] for tool in tools]
        return any(text.count(name) > bare.count(name) for name in names)

    def continuation(
        self,
        previous_ids: IntArray,
        messages: Sequence[ChatMessage],
        num_old: int,
        tools: Sequence[ToolSchema] | None = None,
        *,
        continues: bool = False,
    ) -> Continuation:
        """Return how the prompt for `messages` continues an earlier call.

        `previous_ids` are that call's prompt and completion, int32 `[_T]`; `messages[:num_old]`
        ends with the assistant message that it returned. A turn that was cut short (no end token as
        its last id) is closed first: the closing token is context, never a sampled token. Cost is
        O(new tokens) with `history="keep"`. With `continues` the prompt ends with the last message.
        """
        asked = messages
        if continues:
            from rolltree.inference.rendering import begun, until_mark

            messages = begun(messages)
        # The assistant's message is not rendered again: its ids are those that were sampled.
        assistant, new = messages[num_old - 1], self._as_text(messages[num_old:])
        from rolltree.inference.glue import GlueError

        glue = self._glue(tools)
        try:
            last_id = int(previous_ids[-1]) if len(previous_ids) else None
            before = messages[: num_old - 1]
            ids, text = glue.suffix(last_id, assistant, new, tools, before, opener=not continues)
        # Rare; with history="keep", only this case costs O(history).
        except GlueError as error:
            whole = self.begun_text(asked, tools) if continues else self.text(messages, tools)
            return Continuation(None, self.vocabulary.encode_start(whole), str(error))
        if continues:
            text = until_mark(text)
            ids = self.vocabulary.encode(text)
        if self.history == "template":
            whole = self.begun_text(asked, tools) if continues else self.text(messages, tools)
            # Compared as text, to see whether the template still shows the history unchanged.
            kept = self.vocabulary.decode(previous_ids)
            shown, now = whole.replace(BOUNDARY, ""), kept + text.replace(BOUNDARY, "")
            if shown != now:
                pairs = enumerate(zip(shown, now, strict=False))
                shorter = min(len(shown), len(now))
                at = next((index for index, (one, other) in pairs if one != other), shorter)
                reason = f"the template rewrites the history at character {at}"
                # The sampled tokens are still trained, as part of the earlier call; this prompt
                # starts a different path.
                return Continuation(None, self.vocabulary.encode_start(whole), reason)
        return Continuation(ids)

    def parse(
        self,
        completion_ids: Sequence[int] | IntArray,
        finish_reason: FinishReason = FinishReason.STOP,
        tools: Sequence[ToolSchema] | None = None,
    ) -> ParsedCompletion:
        """Read sampled ids as an assistant message; never raises for what a model wrote."""
        text = self.decode_answer(completion_ids)
        return self.parse_text(text, finish_reason, tools, completion_ids)

    def parse_text(
        self,
        text: str,
        finish_reason: FinishReason = FinishReason.STOP,
        tools: Sequence[ToolSchema] | None = None,
        ids: Sequence[int] | IntArray | None = None,
        begun: str = "",
    ) -> ParsedCompletion:
        """Read an answer's text (no end token) as an assistant message.

        With the sampled `ids` a mark that the model spelled in letters is told from the token. The
        message has only what comes after `begun`, the part of the answer that the prompt has.
        """
        if begun:
            from rolltree.inference.rendering import parse_begun

            return parse_begun(self, begun, text, finish_reason, tools, ids)
        places = None if ids is None else self._parser.places(text, ids, self.decode)
        return self._parser.parse(text, finish_reason, tools, places)

    def reading(
        self,
        tools: Sequence[ToolSchema] | None,
        places: set[int] | None = None,
        *,
        is_begun: bool = False,
    ) -> Reading:
        """Return the state of an answer that is read while it is written.

        `places` says where mark tokens begin in its text, and grows with it; None if the ids are
        not known. `is_begun`: the prompt has the beginning of the answer, and so of its text.
        """
        parser = self._parser.after_reasoning() if is_begun else self._parser
        return parser.reading(tools, places)

    @property
    def mark_tokens(self) -> Mapping[int, str]:
        """The marks of calls and reasoning that are single tokens, by their ids."""
        return self._parser.tokens

    def encode_text(self, text: str, *, start: bool = True) -> IntArray:
        """Return the ids of plain text, int32 `[_T]`; `start=False` when it continues other ids."""
        text = well_formed(text)
        return self.vocabulary.encode_start(text) if start else self.vocabulary.encode(text)

    def decode_answer(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of sampled ids without the end token."""
        # Only the last id can be an end token: sampling stopped there.
        ended = len(ids) > 0 and int(ids[-1]) in self.end_ids
        return self.vocabulary.decode(ids[:-1] if ended else ids)

    def answer_text(self, ids: Sequence[int] | IntArray, sampling: SamplingParams) -> str:
        """Return the text of a finished answer without the token or string that stopped it."""
        # The caller's stop ids need not be end tokens of the template.
        if len(ids) and int(ids[-1]) in sampling.stop_token_ids:
            return self.decode(ids[:-1])
        return cut_at_stop(self.decode_answer(ids), sampling.stop)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of `ids`, special tokens spelled out."""
        return self.vocabulary.decode(ids)


def _sources(tokenizer: Tokenizer, template: str | Mapping[str, str] | None) -> dict[str, str]:
    found: Any = template if template is not None else getattr(tokenizer, "chat_template", None)
    if isinstance(found, str):
        return {"default": found}
    if not isinstance(found, Mapping) or not found:
        return {}
    # The two names that transformers uses for a tokenizer's templates.
    sources = {name: str(text) for name, text in found.items() if name in ("default", "tool_use")}
    sources.setdefault("default", str(next(iter(found.values()))))
    return sources


def _with_content(message: ChatMessage, plain: Callable[[str], str]) -> ChatMessage:
    """Return the message with its content made `plain`; the same dict if nothing changes."""
    # Control tokens in an assistant message are the model's own.
    if message.get("role") == "assistant":
        return message
    content = message.get("content")
    changed: Any = content
    if isinstance(content, str):
        changed = plain(content)
    elif isinstance(content, list | tuple):
        changed = [
            {**part, "text": plain(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else plain(part)
            if isinstance(part, str)
            else part
            for part in content
        ]
    return message if changed == content else {**message, "content": changed}
