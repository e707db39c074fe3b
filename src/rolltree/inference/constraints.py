"""What a request allows as its answer, as a grammar for an engine with constrained decoding.

`response_format`, vLLM's `structured_outputs` and `guided_*`, and a forced tool choice become one
grammar in llguidance's form. A model that reasons may do so first; then comes the answer, or a call
in the model's own format, which is learned from the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rolltree.inference.request_fields import CONSTRAINTS, is_form
from rolltree.inference.template import TemplateError
from rolltree.values.errors import UnsupportedSetting, did_you_mean
from rolltree.values.types import ChatMessage, SamplingParams, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.chat import ChatRenderer

Grammar = dict[str, Any]
"""One of llguidance's: a `json_schema` or a `lark_grammar`."""
_OPTIONS = {"disable_any_whitespace", "whitespace_pattern", "disable_additional_properties"}
# vLLM's, about how its own engine compiles: they change no answer.
_NO_EFFECT = {"disable_fallback", "_backend", "_backend_was_auto", "_asked"}
_SCHEMAS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"}
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_DESCRIBED = ("name", "description", "strict")


def grammar_in(extra: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that a request's fields ask for; None if they allow every answer.

    >>> grammar_in({"guided_choice": ["yes", "no"]})
    {'lark_grammar': 'start: "yes" | "no"'}

    Raises:
        UnsupportedSetting: a field has a value that is none of a constraint, or there are several.
    """
    asked = {name: extra[name] for name in CONSTRAINTS if is_form(name, extra.get(name))}
    if len(asked) > 1:
        raise _unusable(" and ".join(asked), "are given, but an answer has one form. Give one")
    for name, value in asked.items():
        if name == "response_format":
            return _response_format(value)
        if name == "structured_outputs":
            return _structured(value)
        return _KINDS[name.removeprefix("guided_")](name, value, {})
    return None


def _unusable(name: str, why: str) -> UnsupportedSetting:
    return UnsupportedSetting(f"{name} {why}.")


def _response_format(value: Any) -> Grammar:
    match value:
        case {"type": "json_object", **rest}:
            _refuse_others("response_format of type json_object", rest, ())
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema, **described}, **rest}:
            _refuse_others("response_format of type json_schema", rest, ())
            _refuse_others("response_format.json_schema", described, _DESCRIBED)
            return _json("response_format.json_schema.schema", schema, {})
    raise _unusable(
        f"response_format = {shown(value)}",
        'is not known here. It is {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"schema": ...}}',
    )


def _refuse_others(name: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            meant = did_you_mean(str(key), known) if known else ""
            why = f"has {key!r}, which would be ignored.{meant}"
            raise _unusable(name, f"{why} Leave it out; a schema stands in json_schema.schema")


def _structured(value: Any) -> Grammar:
    if not isinstance(value, Mapping):
        raise _unusable(f"structured_outputs = {shown(value)}", "is not an object")
    given = {key: part for key, part in value.items() if part not in (None, False)}
    options = {key: part for key, part in given.items() if key in _OPTIONS}
    kinds = [key for key in given if key not in _OPTIONS and key not in _NO_EFFECT]
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        raise _unusable(
            f"structured_outputs = {shown(value)}", f"names not one of {', '.join(_KINDS)}"
        )
    if options and not kinds[0].startswith("json"):
        raise _unusable(
            f"structured_outputs has {' and '.join(options)}",
            f"for JSON, and would be ignored for {kinds[0]}. Leave it out",
        )
    return _KINDS[kinds[0]](f"structured_outputs.{kinds[0]}", given[kinds[0]], options)


def _json(name: str, schema: Any, options: Mapping[str, Any]) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise _unusable(name, f"is not JSON ({error})") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise _unusable(f"{name} = {shown(schema)}", "is not a JSON Schema")
    own = _closed(schema) if options.get("disable_additional_properties") else dict(schema)
    asked: dict[str, Any] = {}
    if options.keys() >= {"disable_any_whitespace", "whitespace_pattern"}:
        raise _unusable(
            "disable_any_whitespace and whitespace_pattern", "contradict each other. Give one"
        )
    if options.get("disable_any_whitespace"):
        asked["whitespace_flexible"] = False
    if "whitespace_pattern" in options:
        asked["whitespace_pattern"] = _text("whitespace_pattern", options["whitespace_pattern"])
    if asked:
        own["x-guidance"] = {**own.get("x-guidance", {}), **asked}
    return {"json_schema": own}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no other properties than those that it lists."""
    closed = dict(schema)
    for key, part in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(part, Mapping):
            closed[key] = {name: _closed_part(each) for name, each in part.items()}
        elif key in _SCHEMAS:
            is_list = isinstance(part, list)
            closed[key] = [_closed_part(each) for each in part] if is_list else _closed_part(part)
    if "properties" in schema or "patternProperties" in schema or schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_part(part: Any) -> Any:
    return _closed(part) if isinstance(part, Mapping) else part


def _json_object(name: str, value: Any, options: Mapping[str, Any]) -> Grammar:
    return _json(name, {"type": "object"}, options)


def _regex(name: str, value: Any, options: Mapping[str, Any]) -> Grammar:
    pattern = _text(name, value)
    # A slash ends a pattern of Lark.
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return {"lark_grammar": "start: /" + escaped.replace("\n", r"\n") + "/"}


def _choice(name: str, value: Any, options: Mapping[str, Any]) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise _unusable(f"{name} = {shown(value)}", "is not a list of texts")
    return {"lark_grammar": "start: " + " | ".join(map(_quoted, value))}


def _lark(name: str, value: Any, options: Mapping[str, Any]) -> Grammar:
    return {"lark_grammar": _text(name, value)}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _unusable(f"{name} = {shown(value)}", "is not a text")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_KINDS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
"""vLLM's names of constraints, and what makes each a grammar."""


# -- chat ----------------------------------------------------------------------------------------


def constrained(
    sampling: SamplingParams,
    renderer: ChatRenderer | None = None,
    tools: Sequence[ToolSchema] | None = None,
) -> SamplingParams:
    """Return the settings with one grammar in place of the fields that ask for a form.

    Args:
        sampling: the settings of a call.
        renderer: of a chat, whose answer may have reasoning before it; None for a continued text.
        tools: those that the prompt offers.

    Raises:
        UnsupportedSetting: a field has no such form, or the model's format of calls cannot be
            constrained.
    """
    extra = {**sampling.extra, **(sampling.extra.get("extra_body") or {})}
    extra.pop("extra_body", None)
    asked = [name for name in (*CONSTRAINTS, "tool_choice") if is_form(name, extra.get(name))]
    answer = grammar_in(extra)
    choice, parallel = extra.pop("tool_choice", "auto"), extra.get("parallel_tool_calls", True)
    rest = {name: value for name, value in extra.items() if name not in CONSTRAINTS}
    forced = _forced(choice, tools or ()) if is_form("tool_choice", choice) else None
    if renderer is None:
        if forced:
            raise _unusable("tool_choice", "is for chats, and this continues a text")
        parts = [] if answer is None else [answer]
    else:
        parts = _chat(renderer, answer, tools or (), forced, parallel is not False)
    if parts:
        rest.pop("parallel_tool_calls", None)
        grammar = json.dumps({"grammars": parts})
        rest["structured_outputs"] = {"grammar": grammar, "_asked": " and ".join(asked)}
    return replace(sampling, extra=rest)


@dataclass(frozen=True, slots=True)
class _Forced:
    """The tools of which one has to be called, and whether it is a single call."""

    tools: Sequence[ToolSchema]
    is_single: bool


def _forced(choice: Any, tools: Sequence[ToolSchema]) -> _Forced:
    names = [tool["function"]["name"] for tool in tools]
    is_single = False
    match choice:
        case "required":
            wanted = names
        case {"type": "function", "function": {"name": str(name)}}:
            wanted, is_single = [name], True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [*listed]}}:
            wanted = [str(each["function"]["name"]) for each in listed]
        case _:
            raise _unusable(
                f"tool_choice = {shown(choice)}",
                "cannot be followed by the embedded engine, which knows 'auto', 'none', "
                "'required', a function by its name, and allowed_tools with mode 'required'",
            )
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        named = ", ".join(map(shown, unknown)) or "a call"
        raise _unusable(
            f"tool_choice = {shown(choice)}",
            f"asks for {named}, and the request offers {', '.join(names) or 'no tools'}",
        )
    chosen = [tool for tool in tools if tool["function"]["name"] in wanted]
    return _Forced(chosen, is_single)


def _chat(
    renderer: ChatRenderer,
    answer: Grammar | None,
    tools: Sequence[ToolSchema],
    forced: _Forced | None,
    parallel: bool,
) -> list[Grammar]:
    """Return the grammars of a chat's answer; the first refers to the others."""
    if answer is None and forced is None:
        return []
    literal = _Literals(renderer)
    rules = list[str]()
    if forced is not None:
        options, answer = ["calls"], None
        callable_, several = forced.tools, parallel and not forced.is_single
    else:
        options, callable_, several = ["@answer"], tools, parallel
        if tools:  # the model may call one instead
            options.append("calls")
    if callable_:
        rules += _calls(renderer, literal, callable_, several)
    rules += _reasoning(renderer, literal)
    start = f"start: thinking ({' | '.join(options)})"
    main = {"name": "chat", "lark_grammar": "\n".join(["%llguidance {}", start, *rules])}
    return [main] if answer is None else [main, {"name": "answer", **answer}]


class _Literals:
    """Writes text for Lark; what is an added token of the tokenizer has to be that token."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._vocabulary = renderer.vocabulary

    def __call__(self, text: str) -> str:
        at, parts = 0, list[str]()
        for found in self._vocabulary.added.finditer(text):
            ids = self._vocabulary.ids_of([found[0]])
            if len(ids) == 1:
                parts += [_quoted(text[at : found.start()]), f"<[{next(iter(ids))}]>"]
                at = found.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part != '""')


def _reasoning(renderer: ChatRenderer, literal: _Literals) -> list[str]:
    """Return the rule for what may precede an answer: reasoning, or only its end."""
    row, (calls, name) = renderer.parser.thoughts, renderer.formats
    if "harmony" in (calls, name) or name == "response_template":
        raise _unusable(
            "the form of an answer",
            f"cannot be constrained in the format {name!r} of this model, whose answers have "
            "channels. Use a server that does it (vLLM)",
        )
    # A prompt that shows the end of the reasoning leaves none to the answer.
    if not row.end or (not renderer.parser.starts_inside and row.end in renderer.parser.start):
        return ['thinking: ""']
    end = literal(row.end)
    if end.startswith("<["):
        body = ["reasoning: REASONING " + end, "REASONING: /(?s:.*)/"]
    else:
        pattern = re.sub(r"([^\w\s])", r"\\\1", row.end)
        body = [f"reasoning[lazy]: /(?s:.*){pattern}/"]
    begin = "reasoning SPACE"
    if not renderer.parser.starts_inside:
        begin = f"({literal(row.start)} {begin})?"
    return [f"thinking: {begin}", r"SPACE: /\n{0,2}/", *body]


# -- calls, in the form that the template writes --------------------------------------------------

_NAMES = ("qz7probe", "qz8probe")
_VALUE, _ID = "qz7value", ("prb7e0000", "prb8e0000")
_ARGUMENTS = re.compile(r'\{\s*"qz7key"\s*:\s*"' + _VALUE + r'"\s*\}')
_USER: list[ChatMessage] = [{"role": "user", "content": "Probe."}]


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a model's format has around the name and the JSON of a call.

    `between_calls` is None if a message has one call.
    """

    head: str
    between: str
    tail: str
    between_calls: str | None


_FORMS: WeakKeyDictionary[ChatRenderer, CallForm | None] = WeakKeyDictionary()


def call_form(renderer: ChatRenderer) -> CallForm | None:
    """Return the form of calls, or None if their arguments are not one piece of JSON."""
    if renderer not in _FORMS:
        _FORMS[renderer] = _learned(renderer)
    return _FORMS[renderer]


def _calls(
    renderer: ChatRenderer, literal: _Literals, tools: Sequence[ToolSchema], several: bool
) -> list[str]:
    form = call_form(renderer)
    if form is None:
        raise _unusable(
            "tool_choice, or a form of the answer beside tools,",
            f"cannot be followed: calls in the format {renderer.formats[0]!r} of this model are "
            "not a name and one JSON object, which is what can be constrained. Use tool_choice "
            "'auto' without response_format, or a server that does it (vLLM)",
        )
    rules = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        name = _quoted(function["name"])[1:-1] + form.between
        rules.append(f"call_{index}: {literal(name)} %json {json.dumps(schema)}")
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = ""
    if several and form.between_calls is not None:
        more = f" ({literal(form.between_calls)} call)*"
    calls = f"calls: {literal(form.head)} call{more} {literal(form.tail)}"
    return [calls, f"call: {names}", *rules]


def _learned(renderer: ChatRenderer) -> CallForm | None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Probe.",
                "parameters": {"type": "object", "properties": {"qz7key": {"type": "string"}}},
            },
        }
        for name in _NAMES
    ]
    one = _turn(renderer, tools, 1)
    pieces = None if one is None else _pieces(one, 1)
    if one is None or pieces is None:
        return None
    head, between, tail = pieces
    row = renderer.parser.thoughts
    if row.end and row.end in head:
        head = head.rpartition(row.end)[2]
    head = head.lstrip()
    arguments = json.dumps({"qz7key": _VALUE})
    if not _reads(renderer, tools, head + _NAMES[0] + between + arguments + tail, 1):
        return None
    form = CallForm(head, between, tail, None)
    two = _turn(renderer, tools, 2)
    several = None if two is None else _pieces(two, 2)
    if several is None or several[1] != between or several[3:] != (between, tail):
        return form
    calls = [name + between + arguments for name in _NAMES]
    if not _reads(renderer, tools, head + several[2].join(calls) + tail, 2):
        return form
    return replace(form, between_calls=several[2])


def _turn(renderer: ChatRenderer, tools: list[ToolSchema], number: int) -> str | None:
    """Return what a template writes of an answer with so many calls, up to the end of its turn."""
    calls = [
        {
            "id": _ID[index],
            "type": "function",
            "function": {"name": _NAMES[index], "arguments": {"qz7key": _VALUE}},
        }
        for index in range(number)
    ]
    said: ChatMessage = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        opened = renderer.text([*_USER], tools)
        whole = renderer.text([*_USER, said], tools, add_generation_prompt=False)
    except TemplateError:
        return None
    if renderer.parser.starts_inside and not whole.startswith(opened):
        opened = opened[: opened.rindex(renderer.parser.thoughts.start)]
    if not whole.startswith(opened):
        return None
    turn = whole[len(opened) :]
    ends = [at for end in renderer.end_ids if (at := turn.find(renderer.decode([end]))) >= 0]
    # Ids that the template writes are the engine's to make up, and a grammar would repeat one.
    if not ends or any(name in turn for name in _ID):
        return None
    return turn[: min(ends)]


def _pieces(turn: str, number: int) -> tuple[str, ...] | None:
    """Return the text around the names and the arguments of calls, or None if one is missing."""
    pieces, at = [], 0
    for name in _NAMES[:number]:
        place = turn.find(name, at)
        found = _ARGUMENTS.search(turn, max(place, 0))
        if place < 0 or found is None:
            return None
        pieces += [turn[at:place], turn[place + len(name) : found.start()]]
        at = found.end()
    return (*pieces, turn[at:])


def _reads(renderer: ChatRenderer, tools: list[ToolSchema], text: str, number: int) -> bool:
    """Whether an answer's text is read as so many calls of the probes, and nothing else."""
    if renderer.parser.starts_inside:
        text = f"{renderer.parser.thoughts.end}\n{text}"
    message = renderer.parse_text(text, tools=tools).message
    calls = message.get("tool_calls") or ()
    named = [call["function"]["name"] for call in calls]
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    return (
        named == list(_NAMES[:number])
        and arguments == number * [{"qz7key": _VALUE}]
        and not message["content"]
        and "parse_problems" not in message
    )
