"""A Hugging Face chat template: messages in, text out, without transformers.

Chat templates are untrusted programs that come with weights. They are rendered in a worker process
(`template_worker`) that is killed when one runs too long or takes too much memory. Messages are
given the shapes that templates expect: text content, tool arguments as mappings. Images and audio
are rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shown
from typing import Any

from rolltree._helpers.untrusted import read_json
from rolltree._helpers.workers import WorkerCallError, WorkerDied, WorkerPool
from rolltree.values.errors import ConfigError, UnsupportedSetting
from rolltree.values.types import ChatMessage, ErrorKind, ToolSchema

MEMORY_BYTES = 512 * 2**20
"""Address space of the process that renders, including Python."""
_REMEMBERED = 64
"""How many rendered prompts are cached: the members of a group share one."""


class TemplateError(ConfigError):
    """The template rejected this conversation, failed, or exceeded its limits."""

    kind: ErrorKind = "episode"  # the messages may quote what the model wrote


class TemplateLimitError(TemplateError):
    """The template ran too long or used too much memory: it is broken or hostile."""


# One for all templates of the process.
_pool = WorkerPool(
    "rolltree.inference.template_worker:render_request",
    counts_cpu=True,
    memory_bytes=MEMORY_BYTES,
    max_workers=2,
    max_idle=2,
)


class ChatTemplate:
    """One chat template.

    Args:
        source: the template's text.
        variables: extra names that the template may read, with JSON values: the special tokens
            (`bos_token`, `eos_token`) and switches such as `enable_thinking`.
        time_limit_s: the most CPU seconds of one rendering.

    Raises:
        TemplateError: the template does not compile, or exceeds its limits on a short message.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        time_limit_s: float = 2.0,
    ) -> None:
        self.source = source
        # By content: workers keep compiled templates under this name.
        self._name = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        self.variables = dict(variables or {})
        self.time_limit_s = time_limit_s
        self._texts: dict[str, str] = {}  # the latest prompts by their JSON
        self._hidden: dict[tuple[str, bool], bool] = {}
        self._parts = self._wants_parts()

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, special tokens spelled out.

        Raises:
            TemplateError: the template rejects these messages or exceeds its limits.
            UnsupportedSetting: a message holds something other than text.
        """
        prepared = [for_template(message, self._parts) for message in messages]
        try:
            return self._render(prepared, tools, add_generation_prompt)
        except TemplateLimitError:
            raise
        except TemplateError:
            # Some templates (DeepSeek V3) take tool arguments as text, most as a mapping.
            as_text = [_with_text_arguments(message) for message in prepared]
            if as_text == prepared:
                raise
            try:
                return self._render(as_text, tools, add_generation_prompt)
            except TemplateError:
                # The first error is about the messages as they are; the second one would be about
                # a guess.
                pass
            raise

    def render_history(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt's text, in another form if the template refuses what a model wrote.

        So are messages and calls that the template leaves out without a word.

        Raises:
            TemplateError: the template rejects every form, or exceeds its limits.
            UnsupportedSetting: a message holds something other than text.
        """
        messages = self._shown(messages, tools)[0]
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateLimitError:
            raise
        except TemplateError as error:
            first = error
        from rolltree.inference.other_forms import other_forms

        for form in other_forms(messages):
            try:
                return self.render(form, tools, add_generation_prompt=add_generation_prompt)
            except TemplateLimitError:
                raise
            except TemplateError:
                continue
        # It is about the messages as they are.
        raise first

    def notes(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None = None
    ) -> dict[str, str]:
        """Return what of a conversation is shown in another role than its own, by its name."""
        roles = ("system", "developer")
        is_late = any(message.get("role") in roles for message in messages[1:])
        if not is_late or "later system" not in self._shown(messages, tools)[1]:
            return {}
        from rolltree.inference.other_forms import REMINDER_NOTE

        return dict(REMINDER_NOTE)

    def _shown(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None
    ) -> tuple[Sequence[ChatMessage], list[str]]:
        """Return messages as the template shows all of them, and the kinds that were changed."""
        changed: list[str] = []
        if not _is_usual(messages):
            from rolltree.inference.other_forms import KINDS

            for name, kind in KINDS.items():
                if kind.occurs(messages) and self._leaves_out(name, tools):
                    messages = kind.change(list(messages))
                    changed.append(name)
        return messages, changed

    def _leaves_out(self, name: str, tools: Sequence[ToolSchema] | None) -> bool:
        """Whether a short conversation of this kind is rendered without what makes its kind.

        A role that is refused counts as left out: then every conversation has the same form,
        whichever of its messages are new.
        """
        from rolltree.inference.other_forms import KINDS, MARK

        key = (name, bool(tools))
        if key not in self._hidden:
            try:
                shown = self.render(KINDS[name].probe, tools)
                self._hidden[key] = any(
                    f"{MARK}{number}" not in shown for number in range(KINDS[name].num_marks)
                )
            except TemplateLimitError:
                raise
            except TemplateError:
                self._hidden[key] = KINDS[name].is_role
        return self._hidden[key]

    def _render(
        self,
        messages: list[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        add_generation_prompt: bool,
    ) -> str:
        values = {
            **self.variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        order = {"template": self._name, "values": values}
        try:
            # The worker gets them as JSON, too.
            key = json.dumps(values)
            if key in self._texts:
                return self._texts[key]
            reply: dict[str, Any] = _pool.call(order, limit_s=self.time_limit_s)
            # The source goes only to a worker that does not know it yet.
            if reply.get("problem") == "unknown":
                order["source"] = self.source
                reply = _pool.call(order, limit_s=self.time_limit_s)
        except WorkerDied as error:
            what = f"it ran longer than {self.time_limit_s:g} s"
            raise _stopped(what if error.why == "time" else "it took too much memory") from error
        except (WorkerCallError, TypeError, ValueError, RecursionError) as error:
            raise TemplateError(
                f"the messages, tools or variables cannot be given to the chat template: {error}. "
                "It takes values that JSON can hold."
            ) from error
        if "text" in reply:
            if len(self._texts) >= _REMEMBERED:
                # The oldest: dicts keep their order.
                del self._texts[next(iter(self._texts))]
            self._texts[key] = str(reply["text"])
            return self._texts[key]
        raise _problem(reply, [message.get("role") for message in messages])

    def _wants_parts(self) -> bool:
        """Whether content must be a list of parts, as in the templates of vision models."""
        probe = "Qz7PartsZq"
        # A plain string first, which nearly all templates accept.
        for parts in (False, True):
            message = for_template({"role": "user", "content": probe}, parts)
            try:
                # A template that wants parts may drop a string without an error.
                if probe in self._render([message], None, True):
                    return parts
            except (TemplateLimitError, TemplateSyntaxError):
                raise
            except TemplateError:
                continue
        return False


class TemplateSyntaxError(TemplateError):
    """The template does not compile."""


def _stopped(what: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template was stopped: {what}, so there is no prompt. It is broken or hostile; "
        "choose another template."
    )


def _problem(reply: Mapping[str, Any], roles: list[Any]) -> TemplateError:
    problem, message = reply["problem"], reply["message"]
    if problem == "large":
        return _stopped(message)
    if problem == "syntax":
        return TemplateSyntaxError(
            f"the chat template does not compile (line {reply['line']}: {message}), so no prompt "
            "can be rendered. Check the model folder's chat_template."
        )
    if problem == "broken":
        return TemplateError(
            f"the chat template failed with {message}, which no template of a model folder should "
            "do. Choose another template."
        )
    return TemplateError(
        f"the chat template cannot render roles {_shorten(roles)}: {message}. Change the messages "
        "or choose another template."
    )


def _is_usual(messages: Sequence[ChatMessage]) -> bool:
    """Whether there are only a first system message and texts of the user and the assistant."""
    return not any(
        message.get("tool_calls")
        or message.get("role") in ("tool", "developer")
        or (message.get("role") == "system" and index > 0)
        for index, message in enumerate(messages)
    )


def for_template(message: ChatMessage, parts: bool = False) -> ChatMessage:
    """Return the message as templates expect it; the same dict if it already is.

    Content becomes one string (text parts joined with a newline), or a list of one text part.
    JSON strings of tool arguments become mappings, since templates write them out with `tojson`.
    Fields that are null, and an empty list of calls, are left out.
    """
    content = message.get("content")
    calls = message.get("tool_calls")
    # Clients write absent fields as null or empty, and templates ask whether a field is defined.
    empty = [name for name, value in message.items() if value is None or (name, value) == _NO_CALLS]
    if isinstance(content, str) and not calls and not parts and not empty:
        return message
    copy = {name: value for name, value in message.items() if name not in empty}
    text = content if isinstance(content, str) else _joined(content or ())
    copy["content"] = [{"type": "text", "text": text}] if parts else text
    if calls:
        copy["tool_calls"] = [_with_arguments(call, _parsed) for call in calls]
    return copy


_NO_CALLS: tuple[str, list[Any]] = ("tool_calls", [])


def _with_text_arguments(message: ChatMessage) -> ChatMessage:
    if not message.get("tool_calls"):
        return message
    calls = [_with_arguments(call, _dumped) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TemplateError(
            f"a message has the tool call {shown(call)}, which names no function, so there is no "
            'prompt. A call is {"id": ..., "function": {"name": ..., "arguments": ...}}.'
        )
    function = dict(function)
    function["arguments"] = change(function.get("arguments"))
    return {**call, "type": call.get("type", "function"), "function": function}


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            value = read_json(arguments)
        except ValueError:
            # The model wrote them like this, and the template may show them like this.
            return arguments if arguments.strip() else {}
        return value if isinstance(value, dict) else arguments
    return arguments


def _dumped(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _joined(parts: Any) -> str:
    if not isinstance(parts, list | tuple):
        raise _not_content(parts)
    return "\n".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _not_content(part)
    if part.get("type") != "text":
        raise UnsupportedSetting(
            f"a message has a part of type {part.get('type')!r}; only text can be rendered into "
            "token ids here. Send such messages to a server that renders them itself."
        )
    if not isinstance(part.get("text"), str):
        raise _not_content(part)
    return str(part["text"])


def _not_content(part: Any) -> TemplateError:
    return TemplateError(
        f"the content of a message holds {shown(part)}, which is not text, so there is no prompt. "
        'Content is a string, or a list of {"type": "text", "text": ...}.'
    )


def _shorten(roles: list[Any]) -> str:
    shown = ", ".join(map(str, roles[:3] + ["..."] * (len(roles) > 6) + roles[3:][-3:]))
    return f"[{shown}]"
